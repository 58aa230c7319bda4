"""The list of modules in docs/architecture.md, made from the first line of each module's docstring.

python tools/module_table.py            write it
python tools/module_table.py --check    exit status 1 if it is not what the modules say
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: begin (tools/module_table.py) -->", "<!-- modules: end -->"
FOLDERS = (
    *("moot", "moot/core", "moot/rpc", "moot/model", "moot/proposers", "moot/commands", "moot/testing"),
    *("services/router", "services/router/http", "services/router/store", "services/verifier", "services/drafter"),
    "bench",
)


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.splitlines()[0] if text else ""


def table() -> str:
    lines: list[str] = []
    for folder in FOLDERS:
        lines += ["", f"**`{folder}/`**", "", "| module | what it is |", "|---|---|"]
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.stem != "__init__":
                lines.append(f"| `{path.name}` | {first_line(path).replace('|', '/')} |")
    return "\n".join([BEGIN, *lines, "", END])


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    made = before + table() + after
    if "--check" in sys.argv[1:]:
        if made != page:
            print("docs/architecture.md does not list the modules as they are: make docs", file=sys.stderr)
        return int(made != page)
    PAGE.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
