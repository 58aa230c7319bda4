"""Whether the pages of docs/results are older than what they describe: said on each page, below its command.

python tools/results_age.py            write it
python tools/results_age.py --check    exit status 1 if a page does not say it, or says what is not so

Under its title, and under the heading of each section, a page has the command and the commit that was measured; a title
over sections may have none. What counts are the paths that its bench
declares today (`BENCH = Bench(..., measures=...)`): without its bench no page can stay. A page that says that it is old
names the last commit that it counts: later ones make it no less true.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
BY_HAND = ("README.md", "log.md")
_HEADING = re.compile(r"^#+ .*\n\n", re.MULTILINE)
_MADE = re.compile(
    r"#+ \w+\n\n`python -m (?:lab\.)?bench\.(?P<bench>\w+).*` at (?P<commit>[0-9a-f]{7,40})\b.*\n(?P<age>(?:.+\n)*)\n"
)
_TOLD = re.compile(r"(?P<count>\d+) commits? older\*\* than its code \((?P<last>[0-9a-f]+)\)")


def declared(folder: Path) -> dict[str, tuple[str, ...]]:
    """What every bench under `folder` says that it measures, by the bench's name."""
    return dict(_declarations(folder))


def _declarations(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for path in sorted(folder.glob("*/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BENCH":
                assert isinstance(node.value, ast.Call)
                measures = next(keyword.value for keyword in node.value.keywords if keyword.arg == "measures")
                yield ast.literal_eval(node.value.args[0]), tuple(ast.literal_eval(measures))


class History:
    """The commits of one clone."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def touched(self, paths: Iterable[str], since: str, until: str = "HEAD") -> list[str]:
        """Short names of the commits after `since` that touched one of `paths`, the latest first. Raises
        CalledProcessError for commits that are not here."""
        command = ["git", "-C", str(self._root), "log", "--format=%h", f"{since}..{until}", "--", *paths]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    def age(self, commit: str, paths: Sequence[str]) -> str:
        """A sentence; empty for a page that is as new as what it describes."""
        if not (names := self.touched(paths, commit)):
            return ""
        count = len(self.touched(paths, commit, names[0]))
        return f"**{count} commit{'s' * (count > 1)} older** than its code ({names[0]}).\n"

    def is_so(self, text: str, commit: str, paths: Sequence[str]) -> bool:
        """Whether a page says that it is old if it is, and how old it was at the commit that it names."""
        if (told := _TOLD.search(text)) is None:
            return not text and not self.touched(paths, commit)
        try:
            return len(self.touched(paths, commit, told["last"])) == int(told["count"]) > 0
        except subprocess.CalledProcessError:
            return False


def parts(page: str, benches: Mapping[str, Sequence[str]]) -> list[re.Match[str]]:
    """What the heads of a page and of its sections match: bench, commit, age. Raises ValueError where one is without
    the command of a bench that there is."""
    headings = list(_HEADING.finditer(page))
    if headings[1:] and not page.startswith("`", headings[0].end()):
        del headings[0]
    found = [_MADE.match(page, heading.start()) for heading in headings]
    made = [one for one in found if one is not None and one["bench"] in benches]
    if not made or len(made) < len(found):
        raise ValueError("no command of a bench that there is under its title, or under a heading")
    return made


def checked(root: Path, results: Path, *, write: bool) -> list[str]:
    """Names of the pages that are, or were, wrong. Raises CalledProcessError where the history is not here."""
    history, benches = History(root), declared(root / "lab" / "bench")
    wrong = []
    for path in sorted(results.glob("*.md")):
        if path.name in BY_HAND:
            continue
        page = path.read_text()
        made = parts(page, benches)
        if not all(history.is_so(one["age"], one["commit"], benches[one["bench"]]) for one in made):
            wrong.append(path.name)
        if write:
            # From the last on, so that the places of those before stay.
            for one in reversed(made):
                age = history.age(one["commit"], benches[one["bench"]])
                page = page[: one.start("age")] + age + page[one.end("age") :]
            path.write_text(page)
    return wrong


def main(argv: Sequence[str]) -> int:
    is_check = "--check" in argv
    try:
        wrong = checked(ROOT, RESULTS, write=not is_check)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"docs/results: not looked at, as the history is not here ({error})", file=sys.stderr)
        return 0
    if is_check and wrong:
        print(f"docs/results: {', '.join(wrong)}: say how old they are by make docs", file=sys.stderr)
    return int(is_check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
