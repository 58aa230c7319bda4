"""Processes that run no model are small: they never import torch, though it is installed beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moot.testing.tiny_model import make_tiny_model
from tests.waiting import GIVE_UP_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def facts_of(model: Path, prepare: str) -> tuple[str, bool]:
    """What a fresh process makes of the tokenizer, and whether it imported torch."""
    script = (
        f"import sys; from moot import tokenizer as t; {prepare}; k = t.load_tokenizer({str(model)!r});"
        "print(sys.modules.get('torch') is not None, t.tokenizer_fingerprint(k),"
        "k.apply_chat_template([{'role': 'user', 'content': 'x'}], tokenize=True))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=GIVE_UP_S, check=True)
    with_torch, facts = done.stdout.split(" ", 1)
    return facts, with_torch == "True"


def test_a_tokenizer_without_torch_is_the_same_tokenizer(model: Path) -> None:
    """Fingerprint and chat template do not depend on what else is installed."""
    without, with_torch = facts_of(model, "t.keep_torch_out()")
    assert not with_torch
    assert facts_of(model, "import torch") == (without, True)
