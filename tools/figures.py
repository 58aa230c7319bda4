"""Put measured results into the documents: tables from bench/results/*.md, pictures into docs/figures/.

    python tools/figures.py [NAME ...]

The pages of docs/results/ have a place for each measurement, between `<!-- result NAME -->` and
`<!-- end -->`; it gets the command, the machine and the table as the measurement wrote them, and its picture. Without
names: all that were run.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "bench" / "results", ROOT / "docs" / "figures"
DOCUMENTS = sorted((ROOT / "docs" / "results").glob("*.md"))
_PLACE = re.compile(r"(<!-- result (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(document: str, texts: dict[str, str]) -> str:
    """`document` with each of its places whose name is in `texts` filled anew."""

    def fill(match: re.Match[str]) -> str:
        text = texts.get(match["name"])
        return match[0] if text is None else f"{match[1]}{text.strip()}\n{match[3]}"

    return _PLACE.sub(fill, document)


def main(names: list[str]) -> int:
    """Raises KeyError for a name without a place."""
    documents = {path: path.read_text() for path in DOCUMENTS}
    places = [match["name"] for document in documents.values() for match in _PLACE.finditer(document)]
    if missing := set(names).difference(places):
        raise KeyError(f"no place for {', '.join(sorted(missing))}")
    texts = {}
    for name in names or places:
        if not (table := RESULTS / f"{name}.md").exists():
            print(f"{name}: not run here, left as it is")
            continue
        texts[name] = table.read_text()
        if (picture := RESULTS / f"{name}.png").exists():
            FIGURES.mkdir(exist_ok=True)
            shutil.copyfile(picture, FIGURES / picture.name)
            texts[name] += f"\n![{name}](../figures/{picture.name})\n"
    for path, document in documents.items():
        path.write_text(filled(document, texts))
    print(f"filled: {', '.join(texts) or 'nothing'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
