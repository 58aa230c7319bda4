"""What a checkout is in figures, and its map: one line for each folder of code."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from house_rule.circles import circles, shortest_circle
from house_rule.tree import GENERATED, ROOTS, Tree, first_sentence

WORKSHOP = ("lab", "contrib", "tools")
SERVING = ("moot", "services")
MAPPED = ROOTS
BENCHES = "lab/bench/"
"""Its rooms are not mapped: `moot bench` lists what is in them."""


def figures(tree: Tree) -> str:
    """A table of two columns."""
    modules = [one for one in tree.modules.values() if not one.is_package]
    sizes = Counter(one.folder for one in modules)
    longest = max(modules, key=lambda one: one.lines)
    fullest, most = max(((folder, len(tree.modules_of(folder))) for folder in sizes), key=lambda pair: pair[1])
    rows = [
        ("modules", str(len(modules))),
        ("folders that hold them", str(len(sizes))),
        ("fullest folder", f"{fullest} ({most})"),
        ("longest module", f"{longest.path} ({longest.lines} lines)"),
        ("circles of imports", str(len(found := circles(tree.imports)))),
        *(("", " -> ".join(shortest_circle(tree.imports, circle))) for circle in found),
        ("lines of what serves", f"{_lines(tree.root, SERVING, without=(GENERATED, *WORKSHOP)):,}"),
        ("lines of the workshop", f"{_lines(tree.root, WORKSHOP):,}"),
        ("of these in bench", f"{_lines(tree.root, ('lab/bench',)):,}"),
        ("lines of tests", f"{_lines(tree.root, ('tests',)):,}"),
        ("documents", f"{sum(len(text.encode()) for text in tree.pages.values()) / 1000:.1f} kB"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def folder_map(root: Path) -> str:
    """A Markdown list: each folder's name and the sentence of its `__init__`, below the folder that it lies in."""
    inits = [path for name in MAPPED for path in (root / name).rglob("__init__.py")]
    lines = []
    for folder, init in sorted((path.parent.relative_to(root), path) for path in inits):
        if folder.as_posix() != GENERATED and not folder.as_posix().startswith(BENCHES):
            docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
            indent = "  " * (len(folder.parts) - 1)
            lines.append(f"{indent}- `{folder.name}/`: {first_sentence(docstring)}".rstrip())
    return "\n".join(["", *lines, ""])


def _lines(root: Path, folders: tuple[str, ...], without: tuple[str, ...] = ()) -> int:
    left_out = [root / folder for folder in without]
    return sum(
        len(path.read_text().splitlines())
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if not any(path.is_relative_to(one) for one in left_out)
    )
