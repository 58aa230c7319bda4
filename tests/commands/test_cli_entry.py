"""The command line: help with an example everywhere, errors in one sentence, statuses that scripts can rely on."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from moot.cli import COMMANDS, EXIT_FAILED, WORKSHOP, main
from moot.testing.tiny_model import make_tiny_model
from tests.programs import output, run

NOBODY = "http://127.0.0.1:9"
"""Where no server is."""


def status_of(*arguments: str) -> object:
    """What the process would end with."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever asks for help sees how the command is used, and it starts nothing."""
    assert status_of(*filter(None, [command]), "--help") == 0
    out = capsys.readouterr().out
    assert "usage: moot" in out
    assert "example:\n  moot" in out


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ([], 2, ""),
        (["frobnicate"], 2, "unknown command frobnicate"),
        (["serve", "--frobnicate"], 2, "unrecognized arguments"),
        (["serve", "--port", "many"], 2, "--port: 'many' is not a valid int"),
        (["demo", "--drafters", "suffix,suffix", "--model", "x"], 2, "suffix is named twice"),
        (["chat", "--url", "ftp://x"], 1, "is not an http:// or https:// address"),
        (["chat", "--url", NOBODY], 1, f"no answer from {NOBODY}"),
        (["chat", "--url", "http://127.0.0.1:99999"], 1, "is not an http:// or https:// address"),
        (["serve", "--demo", "--model", "x"], 2, "give --demo or --model"),
        (["drafters", "--url", NOBODY], 1, f"no answer from {NOBODY}"),
    ],
)
def test_errors_are_one_sentence_and_a_status(
    arguments: list[str], status: int, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """2 for a wrong command line, 1 for what failed; never a traceback."""
    assert status_of(*arguments) == status
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["frobnicate"], 2, "moot: unknown command frobnicate"),
        # A role takes the process over: it is the service itself, with its flags, its help and its exit status.
        (["serve", "drafter", "--help"], 0, "services.drafter"),
    ],
)
def test_a_process_ends_with_the_status_of_its_command(arguments: list[str], status: int, says: str) -> None:
    """`python -m moot` is the command line and nothing else."""
    done = run(sys.executable, "-m", "moot", *arguments)
    assert done.returncode == status
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_commands_that_need_no_model_import_no_torch() -> None:
    """`moot chat` on a laptop without torch, and an answer to --help in a moment."""
    modules = ", ".join(f"moot.commands.{name}" for name in COMMANDS)
    script = f"import sys, moot.cli, {modules}; assert not {{'torch', 'grpc', 'redis', 'services'}} & set(sys.modules)"
    assert output(sys.executable, "-c", script) == ""


def test_a_tokenizer_without_torch_is_the_same_tokenizer(tmp_path: Path) -> None:
    """Processes that run no model stay small beside an installed torch, and what they make of fingerprint and chat
    template does not depend on it."""
    model = make_tiny_model(tmp_path / "tiny")
    script = (
        "import sys; from moot import tokenizer as t; {};"
        f"k = t.load_tokenizer({str(model)!r});"
        "print(sys.modules.get('torch') is not None, t.tokenizer_fingerprint(k),"
        "k.apply_chat_template([{{'role': 'user', 'content': 'x'}}], tokenize=True))"
    )
    prepared = ("t.keep_torch_out()", "import torch")
    without, beside = (output(sys.executable, "-c", script.format(one)).split(" ", 1) for one in prepared)
    assert (without[0], beside[0]) == ("False", "True")
    assert without[1] == beside[1]


def test_drafter_kinds_are_listed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """The kinds are known here; a server that does not answer is said, not an error, unless it was asked for."""
    assert status_of("drafters") == 0
    out = capsys.readouterr().out
    assert "suffix" in out
    assert "neural" in out


@pytest.mark.parametrize("command", WORKSHOP)
def test_a_command_of_the_workshop_says_that_it_is_not_here(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images that serve leave the package lab out: one sentence there, and no traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([command, "--help"]) == EXIT_FAILED
    assert f"moot: {command} needs the workshop" in capsys.readouterr().err
