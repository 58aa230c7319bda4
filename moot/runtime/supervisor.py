"""Services as child processes: started together, awaited by their ready files, logged to files, ended as one.

The children live in sessions of their own, so that Ctrl-C reaches this process only and they end in order; where the
system can do it (Linux) they get SIGTERM when this process dies without having said so. A child that ends by itself
is reported, never restarted behind the user's back.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from moot.core.errors import DeadlineExceeded, MootError

# Becomes the child. Not code between fork and exec, which crashes where gRPC's threads are running. The 1 is
# PR_SET_PDEATHSIG; a parent that died before that line is told by its id.
_LAUNCHER = """
import os, signal, sys
niceness, parent = int(sys.argv[1]), int(sys.argv[2])
os.nice(niceness)
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)
os.execvp(sys.argv[3], sys.argv[3:])
"""
_SHOWN_LOG_LINES = 15

# Settings of this process that would be wrong for any child: its config file has other keys.
_OWN_VARIABLES = frozenset({"MOOT_CONFIG", "MOOT_READY_FILE"})

Say = Callable[[str], None]


def tied_to_this_process(argv: Sequence[str], niceness: int = 0) -> list[str]:
    """`argv` such that the process it starts gets SIGTERM when this one dies (on Linux)."""
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(niceness), str(os.getpid()), *argv]


class ChildFailed(MootError):
    """A service ended before it was ready, or while it was needed. The message ends with its last log lines."""


@dataclass(slots=True)
class Child:
    """A started process. `facts` is what its ready file said: port, metrics_port, pid."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    essential: bool
    look: Callable[[], dict[str, Any] | None]
    """Its facts once it is ready; None: not yet."""
    facts: dict[str, Any] = field(default_factory=dict)
    reported: bool = False

    @property
    def port(self) -> int:
        return int(self.facts["port"])

    @property
    def status(self) -> int | None:
        """Exit status; minus the signal's number when one ended it; None while it runs."""
        return self.process.poll()

    def failure(self) -> ChildFailed:
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:] if self.log.exists() else []
        tail = "".join(f"\n    {line}" for line in lines)
        return ChildFailed(f"{self.name} ended with status {self.status}; the end of its log {self.log}:{tail}")


class Supervisor:
    """Owns the children it starts. Use as a context manager, from the main thread; leaving it ends them all."""

    POLL_S = 0.05

    def __init__(
        self,
        folder: Path,
        *,
        grace_s: float = 10.0,
        say: Say = lambda text: None,
        own_variables: Collection[str] = (),
    ) -> None:
        """`folder` gets logs and ready files. `grace_s`: from SIGTERM to SIGKILL, for all children together.

        `own_variables`: environment variables that set this process, and that no child must take for its own.
        """
        self._own_variables = _OWN_VARIABLES.union(own_variables)
        self._folder = folder
        self._grace_s = grace_s
        self._say = say
        self.children: list[Child] = []
        folder.mkdir(parents=True, exist_ok=True)

    def spawn(
        self,
        name: str,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        niceness: int = 0,
        essential: bool = True,
        look: Callable[[], dict[str, Any] | None] | None = None,
    ) -> Child:
        """Start `argv`; `{ready_file}` in it is replaced. `environ` is added to this process's environment.

        `look`: how readiness is seen in a program that writes no ready file.
        """
        ready_file = self._folder / f"{name}.ready"
        ready_file.unlink(missing_ok=True)
        log = self._folder / f"{name}.log"
        command = [part.replace("{ready_file}", str(ready_file)) for part in argv]
        inherited = {name: value for name, value in os.environ.items() if name not in self._own_variables}
        with log.open("ab") as output:
            process = subprocess.Popen(
                tied_to_this_process(command, niceness),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**inherited, **(environ or {})},
                start_new_session=True,
            )
        child = Child(name, process, log, essential, look or (lambda: _read_facts(ready_file)))
        self.children.append(child)
        return child

    def service(self, name: str, role: str, flags: Sequence[str], **options: Any) -> Child:
        """Start `python -m services.<role>`."""
        argv = [sys.executable, "-m", f"services.{role}", *flags, "--ready-file", "{ready_file}"]
        return self.spawn(name, argv, **options)

    def wait_ready(self, children: Iterable[Child], timeout_s: float) -> None:
        """Until each has written its ready file. Raises ChildFailed, DeadlineExceeded."""
        waiting = list(children)
        started = time.monotonic()
        told = 0
        while waiting:
            for child in list(waiting):
                if (facts := child.look()) is not None:
                    child.facts = facts
                    waiting.remove(child)
                elif child.status is not None:
                    raise child.failure()
            seconds = time.monotonic() - started
            if waiting and seconds > timeout_s:
                names = ", ".join(child.name for child in waiting)
                raise DeadlineExceeded(f"not ready after {timeout_s:g} s: {names} (logs in {self._folder})")
            if waiting and seconds >= (told + 1) * 5:
                told += 1
                self._say(f"waiting for {', '.join(child.name for child in waiting)} ({seconds:.0f} s)")
            time.sleep(self.POLL_S)

    def check(self) -> None:
        """Report children that have ended; raises ChildFailed when one was essential."""
        for child in self.children:
            if child.status is None or child.reported:
                continue
            child.reported = True
            if child.essential:
                raise child.failure()
            self._say(f"{child.name} ended with status {child.status}; the others go on (log: {child.log})")

    def stop(self) -> None:
        """SIGTERM to all in the reverse order of their start, SIGKILL to those left after the grace."""
        for child in reversed(self.children):
            _signal(child, signal.SIGTERM)
        deadline = time.monotonic() + self._grace_s
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._say(f"{child.name} did not end in {self._grace_s:g} s and is killed")
                _signal(child, signal.SIGKILL)
                child.process.wait()
        self.children.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _read_facts(ready_file: Path) -> dict[str, Any] | None:
    return json.loads(ready_file.read_text()) if ready_file.exists() else None


def _signal(child: Child, number: signal.Signals) -> None:
    """By process id, and only while the process is ours to signal: not yet waited for."""
    if child.status is None:
        child.process.send_signal(number)
