"""Preparing a model: pinned, atomic, once; and the demo's model answers."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from moot.core.errors import ConfigError, ModelRefused
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.loading.prepare import SMOLLM2, check_sha256, prepare, prepare_smollm2, publish
from moot.shipped import cache_dir
from moot.testing.tiny_model import make_tiny_model


def test_a_wheel_with_another_digest_is_not_used(tmp_path: Path) -> None:
    wheel = tmp_path / "some.whl"
    wheel.write_bytes(b"something else")
    check_sha256(wheel, hashlib.sha256(b"something else").hexdigest())
    with pytest.raises(ConfigError, match="is not used"):
        check_sha256(wheel, hashlib.sha256(b"what was pinned").hexdigest())


def test_the_first_finished_folder_wins(tmp_path: Path) -> None:
    """Two processes prepare at once: the second one's folder disappears, nobody sees half a folder."""
    for name in ("first", "second"):
        made = tmp_path / name
        made.mkdir()
        (made / "config.json").write_text(name)
        publish(made, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").read_text() == "first"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_local_folder_is_checked_and_returned(tmp_path: Path) -> None:
    lines: list[str] = []
    path = make_tiny_model(tmp_path / "good")
    assert prepare(str(path), tmp_path, lines.append) == path
    assert lines == [f"checking {path}"]
    (tmp_path / "bad").mkdir()
    with pytest.raises(ModelRefused):
        prepare(str(tmp_path / "bad"), tmp_path, lines.append)


def test_the_cache_is_where_the_environment_says() -> None:
    assert cache_dir({"MOOT_CACHE": "/some/where"}) == Path("/some/where")
    assert cache_dir({}) == Path("~/.cache/moot").expanduser()


def test_the_demo_model_answers(tmp_path: Path) -> None:
    """Prepared once and found at once after that, it follows its chat template, answers and ends its turn."""
    folder = prepare_smollm2(cache_dir())
    lines: list[str] = []
    assert prepare(SMOLLM2, None, lines.append) == folder
    assert lines == []
    loaded = load_model(folder, dtype="bfloat16")
    assert loaded.info.context_limit == 8192
    assert loaded.info.vocab_size == 49152
    runner = plain_runner(loaded, 512, True)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    pending = loaded.tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    cache, answer = runner.new_cache(), []
    while len(answer) < 40 and not loaded.info.end_token_ids.intersection(answer):
        (logits,) = runner.forward([SequenceInput(cache, pending, None, [len(pending) - 1])])
        cache.commit(range(len(pending)))
        pending = [int(logits[0].argmax())]
        answer += pending
    assert "Paris" in loaded.tokenizer.decode(answer)
    assert loaded.tokenizer.decode(answer[-1:]) == "<|im_end|>"
