"""The list of modules in docs/architecture.md, made from the first line of each module's docstring.

python tools/module_table.py            write it
python tools/module_table.py --check    exit status 1 if it is not what the modules say
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from generated import write_or_check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
ROOTS = ("moot", "services/router", "services/verifier", "services/drafter", "lab", "contrib")
GENERATED = {"moot/v1"}


def folders() -> list[str]:
    """Every folder with modules, a root before the folders in it."""
    found = [
        folder.relative_to(ROOT).as_posix()
        for root in ROOTS
        for folder in [ROOT / root, *sorted(path for path in (ROOT / root).rglob("*") if path.is_dir())]
    ]
    return [folder for folder in found if folder not in GENERATED and any((ROOT / folder).glob("[!_]*.py"))]


def first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.splitlines()[0] if text else ""


def table() -> str:
    lines: list[str] = []
    for folder in folders():
        lines += ["", f"**`{folder}/`**", "", "| module | what it is |", "|---|---|"]
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.stem != "__init__":
                lines.append(f"| `{path.name}` | {first_line(path).replace('|', '/')} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, "modules", table(), "does not list the modules as they are"))
