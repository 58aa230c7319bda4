"""The ablation's steps, and which prompts it asks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.bench.ablation import PLAIN, AblationConfig, chosen_prompts, rows, steps
from moot.core.errors import ConfigError


def test_each_step_is_compared_with_one_that_is_measured() -> None:
    """Of the chosen steps each names one before it, or plain; plain is always there."""
    for config in (
        AblationConfig(),
        AblationConfig(neural="model"),
        AblationConfig(neural="model", steps=("tree", "stages")),
        AblationConfig(steps=("nothing of this name",)),
    ):
        names = []
        for one in steps(config):
            names.append(one.name)
            assert one.before in names
        assert names[0] == PLAIN
        assert len(set(names)) == len(names)
    assert len(steps(AblationConfig(steps=("tree",)))) == 2


def test_the_last_step_of_the_cheap_drafters_is_the_default() -> None:
    """The router is told nothing there: what the ablation ends with is what is served."""
    last = steps(AblationConfig())[-1]
    assert not last.flags
    assert not last.body


def test_ratios_are_of_runs_of_one_turn() -> None:
    """A slow minute is in both parts of a ratio."""
    chosen = steps(AblationConfig(steps=("tree",)))

    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": speed, "tokens_per_round": 2.0, "drafted_per_round": 3.0} for speed in speeds]

    found = {"4": {"runs": {PLAIN: runs(10, 1, 20), "+ tree": runs(30, 3, 60)}, "differing": ["+ tree"]}}
    (_, tree) = rows(found, chosen)
    assert tree == ("4", "+ tree", "30.0 (3.0 to 60.0)", *("3.00 (3.00 to 3.00)",) * 2, "2.00", "3.0", "NO")


def test_only_questions_that_nothing_was_chosen_on(tmp_path: Path) -> None:
    """With --held-out only ids ending in 7 are asked, and a file is needed."""
    path = tmp_path / "questions.jsonl"
    lines = [{"question_id": number, "category": "qa", "turns": [f"text {number}"]} for number in range(1, 40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert chosen_prompts(AblationConfig(prompts=path, held_out=True), 3) == {
        "7": "text 7",
        "17": "text 17",
        "27": "text 27",
    }
    with pytest.raises(ConfigError, match="prompts"):
        chosen_prompts(AblationConfig(held_out=True), 3)
