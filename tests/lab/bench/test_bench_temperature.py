"""The measurement of drafts at temperature > 0 finds what is known beforehand: a draft model that is the target."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import lab.bench.report
from lab.bench.replay_temperature import WAYS, main
from moot.model.loading.load import load_model
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.attached.heads_made import make_head

K = 3


def test_coupled_drafts_of_the_target_itself_are_always_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round commits K + 1 tokens when the target's own distribution is drafted with its noise, and fewer when it
    is drafted greedily, sharper or with other noise; a head of random weights is drafted in all ways; what was recorded
    is not recorded again."""
    target = make_tiny_model(tmp_path / "target")
    head = make_head(tmp_path / "head", load_model(target, "cpu", "float32"))
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"question_id": number, "category": "qa", "turns": [f"{number} = "]} for number in (17, 18, 27)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(lab.bench.report, "RESULTS", tmp_path / "results")
    arguments = ["--target", str(target), "--prompts", str(prompts), "--out", str(tmp_path / "out"), "-k", str(K)]
    arguments += ["--temperatures", "1.0,1.5", "--max-tokens", "41", "--dtype", "float32", "--num-threads", "1"]
    models = f"same=neural:model={target}:dtype=float32:device=cpu:num_threads=1,other=heads:path={head}"
    arguments += ["--models", models, "--points", "suffix,recycling", "--widths", "1,2"]
    monkeypatch.setattr(sys, "argv", ["replay_temperature", *arguments])
    assert main() == 0
    facts = json.loads((tmp_path / "results" / "replay_temperature.json").read_text())
    assert facts["texts"] == 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npz")}
    assert len(written) == 2 * (1 + 2 + 2 * len(WAYS))
    for lengths in facts["lengths"].values():
        alone = lengths["same alone"]
        # 41 tokens: one by the opening, the others in rounds of K + 1.
        assert alone["coupled"] == K + 1
        assert all(alone[way] < K + 0.8 for way in WAYS if way != "coupled")
        assert alone["independent"] < K
        assert set(lengths["tree of 7, 1 each"]) == set(lengths["other alone"]) == set(WAYS)
        assert lengths["tree of 15, 2 each"]["coupled"] > lengths["tree of 15, 2 each, without same and other"][""]
    assert main() == 0
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.npz")}
    assert facts == json.loads((tmp_path / "results" / "replay_temperature.json").read_text())
