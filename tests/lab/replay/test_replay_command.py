"""`moot replay run`: what it prints is what the replay found, and a mistake is one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lab.replay.evaluate import Policies, Replay, by_group, outcome_of
from moot.cli import main
from tests.lab.replay.recordings import made_up_texts, make_recording


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording")
    make_recording(path, made_up_texts())
    return path


def test_the_report_has_the_numbers_of_the_replay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Acceptance by category and in all, by depth, votes won, each drafter alone; -k and --policy are short for long
    names; a length policy adds the clock's tokens per second, a cascade whom it skipped."""
    assert main(["replay", "run", str(folder), "--policy", "majority", "--shape", "chain", "-k", "4"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    replay = Replay(make_recording(folder, made_up_texts()))
    policies = Policies(vote="majority", shape="chain", num_speculative_tokens=4)
    played = replay.run(policies)
    for group, found in [*by_group(played).items(), ("all", outcome_of(played))]:
        assert [group, str(found.num_rounds), f"{found.mean_acceptance_length:.3f}"] in [line[:3] for line in shown]
    whole = outcome_of(played)
    for depth, count in enumerate(whole.accepted_per_position, 1):
        assert [str(depth), str(count)] in [line[:2] for line in shown]
    for id_, alone in replay.alone(policies).items():
        assert [id_, str(whole.votes_won[id_]), f"{outcome_of(alone).mean_acceptance_length:.3f}"] in [
            [line[0], line[-2], line[-1]] for line in shown if len(line) == 5
        ]
    assert main(["replay", "run", str(folder), "--length", "goodput", "--alone", "false"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    # Beside such a step no drafter is expensive, whatever made it wait when it was recorded.
    slow = ["--cascade", "0.1", "--verify-ms", "1e6"]
    assert main(["replay", "run", str(folder), *slow, "--alone", "false"]) == 0
    assert "not asked: nobody" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["replay", "walk"], "known are record, run"),
        (["replay", "run"], "needs the folder of a recording"),
        (["replay", "run", "nowhere"], "nothing is recorded in nowhere"),
        (["replay", "run", "nowhere", "--vote", "best-of-all"], "is not one of majority, calibrated"),
        (["replay", "run", "nowhere", "--width", "0"], "--width must be at least 1"),
        (["replay", "record", "--out", "x", "--prompts", "none.jsonl"], "no prompts in none.jsonl"),
        (["replay", "record", "--out", "x", "--prompts", "p", "--num-rows", "0"], "--num-rows must be at least 1"),
        (["replay", "record", "--out", "x", "--prompts", "p", "--drafters", "=suffix"], "is not \\[id=\\]kind"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit status 2 and what is wrong, without a traceback and before anything is computed."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert re.search(sentence, said)
    assert "\n" not in said


def test_usage_names_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an action the usage is shown with an example."""
    assert main(["replay"]) == 2
    assert main(["replay", "--help"]) == 0
    assert "moot replay record --prompts" in capsys.readouterr().out
