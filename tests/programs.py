"""Programs that a test runs to their end."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import GIVE_UP_S


def run(
    *command: str | Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    sent: str | None = None,
    timeout_s: float = GIVE_UP_S,
) -> subprocess.CompletedProcess[str]:
    """Its exit status, output and errors, whatever they are. `sent`: its standard input."""
    return subprocess.run(
        command, cwd=cwd, env=env, input=sent, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def output(*command: str | Path, **how: object) -> str:
    """What it prints; an AssertionError with its errors when it fails."""
    done = run(*command, **how)  # type: ignore[arg-type]
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout
