"""The command line: help with an example everywhere, errors in one sentence, statuses that scripts can rely on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from moot.cli import COMMANDS, EXIT_FAILED, WORKSHOP, main
from tests.waiting import GIVE_UP_S


def moot(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moot", *arguments],
        capture_output=True,
        text=True,
        timeout=GIVE_UP_S,
        env={**os.environ, **environ},
        check=False,
    )


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help_with_an_example(command: str) -> None:
    """Whoever asks for help sees how the command is used, and it starts nothing."""
    done = moot(*filter(None, [command]), "--help")
    assert done.returncode == 0, done.stderr
    assert "usage: moot" in done.stdout
    assert "example:\n  moot" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "sentence"),
    [
        ([], 2, ""),
        (["frobnicate"], 2, "unknown command frobnicate"),
        (["serve", "--frobnicate"], 2, "unrecognized arguments"),
        (["serve", "--port", "many"], 2, "--port: 'many' is not a valid int"),
        (["demo", "--drafters", "suffix,suffix", "--model", "x"], 2, "suffix is named twice"),
        (["chat", "--url", "ftp://x"], 1, "is not an http:// or https:// address"),
        (["chat", "--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
        (["chat", "--url", "http://127.0.0.1:99999"], 1, "is not an http:// or https:// address"),
        (["serve", "--demo", "--model", "x"], 2, "give --demo or --model"),
        (["drafters", "--url", "http://127.0.0.1:9"], 1, "no answer from http://127.0.0.1:9"),
    ],
)
def test_errors_are_one_sentence_and_a_status(arguments: list[str], status: int, sentence: str) -> None:
    """2 for a wrong command line, 1 for what failed; never a traceback."""
    done = moot(*arguments)
    assert done.returncode == status, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_that_need_no_model_import_no_torch() -> None:
    """`moot chat` on a laptop without torch, and an answer to --help in a moment."""
    modules = ", ".join(f"moot.commands.{name}" for name in COMMANDS)
    script = f"import sys, moot.cli, {modules}; assert not {{'torch', 'grpc', 'redis', 'services'}} & set(sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=GIVE_UP_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_role_takes_the_process_over() -> None:
    """`moot serve ROLE` is the service itself: its flags, its help, its exit status."""
    done = moot("serve", "drafter", "--help")
    assert done.returncode == 0
    assert "services.drafter" in done.stdout


def test_drafter_kinds_are_listed_without_a_server() -> None:
    """The kinds are known here; a server that does not answer is said, not an error, unless it was asked for."""
    done = moot("drafters")
    assert done.returncode == 0
    assert "suffix" in done.stdout
    assert "neural" in done.stdout


@pytest.mark.parametrize("command", WORKSHOP)
def test_a_command_of_the_workshop_says_that_it_is_not_here(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images that serve leave the package lab out: one sentence there, and no traceback."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main([command, "--help"]) == EXIT_FAILED
    assert f"moot: {command} needs the workshop" in capsys.readouterr().err
