"""Tests are packages: each module has one dotted name, from whatever folder it is collected."""

from __future__ import annotations

import re
from pathlib import Path

FILES = sorted(Path(__file__).parents[1].rglob("*.py"))


def test_every_folder_with_tests_is_a_package() -> None:
    """A module outside a package would be imported by its base name, and shadow another of that name."""
    assert len(FILES) > 200
    assert [path for path in FILES if not (path.parent / "__init__.py").exists()] == []


def test_nobody_imports_a_conftest() -> None:
    """Each folder may have one: what tests import by name stands in a module with a name of its own."""
    statement = re.compile(r"^\s*(from|import)\s.*\bconftest\b", re.MULTILINE)
    assert [path.name for path in FILES if statement.search(path.read_text())] == []


def test_no_image_that_serves_has_the_workshop() -> None:
    """Nothing of lab and contrib is in the context that images are made from, and no Dockerfile asks for it."""
    root = Path(__file__).parents[2]
    ignored, *allowed = [line for line in (root / ".dockerignore").read_text().splitlines() if line[:1] in "*!"][:6]
    assert ignored == "*"
    assert {"!lab", "!contrib"}.isdisjoint(allowed)
    dockerfiles = sorted((root / "services").glob("*/Dockerfile"))
    assert len(dockerfiles) == 3
    assert [path for path in dockerfiles if "lab" in path.read_text().split() or "contrib" in path.read_text()] == []
