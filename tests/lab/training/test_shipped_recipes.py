"""The recipes of the shipped drafters: each still builds a drafter."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from moot.shipped import PREFIX, locate

TOOL = Path(__file__).parents[3] / "tools" / "build_drafters.py"


def test_every_shipped_drafter_still_builds(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make drafters`, on a tiny target: files of the same names as those that are shipped, from its own text."""
    spec = importlib.util.spec_from_file_location("build_drafters", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setenv("MOOT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 118, "prompt": "asked"}\n')
    flags = ["--prompts", prompts, "--target", target_folder, "--positions", 1, "--out", tmp_path / "made"]
    monkeypatch.setattr(sys, "argv", ["build_drafters.py", *map(str, flags)])
    assert tool.main() == 0
    for name in tool.RECIPES:
        made, shipped = tmp_path / "made" / name, locate(PREFIX + name)
        weights = {path.name for path in shipped.iterdir() if path.suffix in (".npz", ".npy", ".safetensors")}
        assert weights
        assert weights <= {path.name for path in made.iterdir()}
        assert "mean acceptance length, K = 8" in (made / "README.md").read_text()
