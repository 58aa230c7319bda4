"""One service as a process of its own, on free ports of loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from moot.runtime.supervisor import Supervisor
from tests.integration.processes import LOOPBACK, START_TIMEOUT_S, Process
from tests.waiting import GIVE_UP_S


@contextmanager
def service_process(folder: Path, role: str, *flags: str, faults: str = "") -> Iterator[Process]:
    """`python -m services.ROLE`, ready to be asked; killed at the end, if it still runs."""
    every = ("--host", LOOPBACK, "--port", "0", "--metrics-port", "0", *flags)
    with Supervisor(folder) as supervisor:
        process = Process(supervisor, role, role, every, faults)
        supervisor.wait_ready([process.child], START_TIMEOUT_S)
        try:
            yield process
        finally:
            process.kill()


def refusal_of(role: str, *flags: str) -> str:
    """The one sentence with which a service that cannot start ends, without a traceback and with status 2."""
    command = [sys.executable, "-m", f"services.{role}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]
