"""Tokenizers are told apart by what their ids mean."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moot.core.errors import ConfigError
from moot.testing.tiny_model import byte_tokenizer, make_tiny_model
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint, vocabulary_size
from tests.waiting import GIVE_UP_S


def changed(path: Path, edit: str) -> str:
    """The fingerprint of the byte tokenizer with something changed."""
    byte_tokenizer().save_pretrained(path)
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    if edit == "permuted":
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    elif edit == "not special":
        content["added_tokens"][1]["special"] = False
    elif edit == "longer":
        vocabulary["ab"] = 259
        content["model"]["merges"] = [["a", "b"]]
    file.write_text(json.dumps(content))
    return tokenizer_fingerprint(load_tokenizer(path))


def test_c08_fingerprints_differ_where_ids_mean_something_else(tmp_path: Path) -> None:
    """Same size with permuted ids, a token that is not special any more, one token more: all are other tokenizers."""
    prints = {edit: changed(tmp_path / edit, edit) for edit in ("", "permuted", "not special", "longer")}
    assert len(set(prints.values())) == 4
    assert prints[""] == tokenizer_fingerprint(byte_tokenizer())


def test_fingerprint_outlives_a_model_folder(tmp_path: Path) -> None:
    """Models of different families with one tokenizer have one fingerprint; padding rows of a model do not count."""
    prints = {
        tokenizer_fingerprint(load_tokenizer(make_tiny_model(tmp_path / family, family, vocab_size=size)))
        for family, size in (("llama", 300), ("gpt_neox", 512))
    }
    assert prints == {tokenizer_fingerprint(byte_tokenizer())}


def test_byte_tokenizer_spells_everything(tmp_path: Path) -> None:
    """Ids below 256 are the bytes of the text; special tokens are one id each; the chat template ends in a turn."""
    byte_tokenizer().save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "héllo 世界 🎉\n\x00"
    assert tokenizer.encode(text, add_special_tokens=False) == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert vocabulary_size(tokenizer) == 259
    turn = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert turn == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [258]


def test_no_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_tokenizer(tmp_path)


def test_importing_it_needs_no_torch() -> None:
    """The router imports this module."""
    code = "import sys, moot.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=GIVE_UP_S, check=False).returncode == 0
