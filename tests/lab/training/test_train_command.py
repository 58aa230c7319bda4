"""`moot train` and `moot index` as a person calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.training.dataset import TextStore
from lab.training.teacher import product_dtype
from moot.cli import main
from moot.drafters.lookup.datastore import Datastore


def test_from_a_target_to_a_drafter_and_a_datastore(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One command makes the text it needs and the drafter; a second one finds the text; what was made is printed."""
    monkeypatch.setenv("MOOT_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 117, "prompt": "held out"}\n{"question_id": 118, "prompt": "asked"}\n')
    common = ["train", "--target", str(target_folder), "--positions", "1", "--prompts", str(prompts)]
    out = tmp_path / "counted"
    assert main([*common, "--kind", "ngram", "--size", "small", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == str(out)
    assert "1 prompts are held out" in printed.err
    assert (out / "table.npz").is_file()
    card = (out / "README.md").read_text()
    assert "moot train --kind ngram --target" in card
    assert "--prompts prompts.jsonl --out counted" in card
    assert main([*common, "--kind", "text"]) == 0
    folder = Path(capsys.readouterr().out.strip())
    assert folder.is_relative_to(tmp_path / "cache" / "training")
    assert TextStore(folder).indices() == [0]
    # Never what a short measurement found: a busy moment would begin another text.
    assert TextStore(folder).manifest["dtype"] == str(product_dtype())
    heads = tmp_path / "heads"
    assert main([*common, "--kind", "heads", "--size", "small", "--passes", "0.05", "--out", str(heads)]) == 0
    assert json.loads((heads / "config.json").read_text())["kind"] == "heads"
    file = tmp_path / "more.txt"
    file.write_text("one more text")
    indexed = tmp_path / "datastore"
    flags = ["--text", str(folder), "--files", str(file), "--target", str(target_folder), "--out", str(indexed)]
    assert main(["index", *flags]) == 0
    found = Datastore(indexed).continuation(list(b"one mor"), 6)
    assert bytes(found.token_ids) == b"e text"
    card = (indexed / "README.md").read_text()
    assert f"moot index --text {folder.name} --out datastore" in card
    assert "mean acceptance length, K = 8" in card


def test_without_time_nothing_is_made(target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit ends a command well: exit status 0, and no half drafter."""
    monkeypatch.setenv("MOOT_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "heads"
    flags = ["--target", str(target_folder), "--kind", "heads", "--positions", "1", "--minutes", "0"]
    assert main(["train", *flags, "--out", str(out)]) == 0
    assert not out.exists()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["train", "--kind", "heads"], "--out"),
        (["train", "--kind", "nothing"], "nothing"),
        (["train", "--kind", "text", "--positions", "0"], "--positions"),
        (["train", "--kind", "heads", "--out", "x", "--passes", "0"], "--passes"),
        (["index", "--out", "x"], "--files"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A usage error is one sentence that names the flag, with exit status 2."""
    assert main(flags) == 2
    assert named in capsys.readouterr().err
