"""Test files find their helpers by name on one path, whichever folders are collected together."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

FILES = sorted(Path(__file__).parents[1].rglob("*.py"))


def test_every_file_below_tests_has_a_name_of_its_own() -> None:
    """Of two helpers with one name, whoever imports it gets the one that was imported first."""
    names = Counter(path.stem for path in FILES if path.stem not in ("conftest", "__init__"))
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


def test_nobody_imports_a_conftest() -> None:
    """Each folder may have one: what tests import by name stands in a module with a name of its own."""
    imports = [
        path.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.ImportFrom) and node.module == "conftest")
        or (isinstance(node, ast.Import) and any(alias.name == "conftest" for alias in node.names))
    ]
    assert imports == []
