"""`moot simulate` as a person uses it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moot.cli import main

SMALL = ["simulate", "--verifiers", "2", "--replicas", "2", "--warm-up-s", "1", "--measure-s", "2"]


def test_a_row_for_each_concurrency_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers on the command line, others from a YAML file; more requests, more tokens per second."""
    settings = tmp_path / "plan.yaml"
    settings.write_text("draft_token_ms: 2\nacceptance: [0.8, 0.7]\n")
    picture = tmp_path / "plan.png"
    assert main([*SMALL, "--config", str(settings), "--concurrency", "1,8", "--picture", str(picture)]) == 0
    header, _, alone, many = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["concurrency", "tokens/s"]
    speeds = [float(line.split()[1].replace(",", "")) for line in (alone, many)]
    assert speeds[1] > 2 * speeds[0] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags", [["--acceptance", "1.5"], ["--load", "1:200"], ["--verifiers", "0"], ["--failed-verifiers", "1"]]
)
def test_sizes_that_make_no_installation_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A sentence and exit status 2, before anything is simulated."""
    assert main([*SMALL, *flags]) == 2
    assert capsys.readouterr().err.startswith("moot: ")
