"""The supervisor of services that run as child processes.

They start together, are awaited by their ready files, replaced if asked for, and end as one. The children live in
sessions of their own, so that Ctrl-C reaches this process only and they end in order; where the system can do it
(Linux) they get SIGTERM when this process dies without having said so. A child that ends by itself is reported, and
started again only where that was asked for.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
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
_BACKOFF_MIN_S, _BACKOFF_MAX_S = 0.5, 30.0
_STEADY_S = 60.0
"""A child that has served for so long is replaced at once when it ends."""

_log = logging.getLogger("moot.supervisor")

# Settings of this process that would be wrong for any child: its config file has other keys.
_OWN_VARIABLES = frozenset({"MOOT_CONFIG", "MOOT_READY_FILE"})

Say = Callable[[str], None]


class ChildFailed(MootError):
    """A service ended before it was ready, or while it was needed. The message ends with its last log lines, if it has
    a log of its own."""


@dataclass(slots=True)
class Child:
    """A program that runs in a process; in a new one each time that it is replaced."""

    name: str
    start: Callable[[], subprocess.Popen[bytes]]
    look: Callable[[], dict[str, Any] | None]
    """Its facts once it is ready; None: not yet."""
    log: Path | None
    """None: it writes where this process does."""
    essential: bool
    """Nothing goes on without it."""
    process: subprocess.Popen[bytes]
    replaced: bool = False
    """It is started again when it ends, essential or not."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What its ready file said: port, metrics_port, pid. Another dict for each process, empty until it is ready."""
    ready_at: float | None = None
    """Monotonic seconds; None: not ready yet."""
    start_at: float | None = None
    """Of one that has ended, once that is known: when it is started again, never if infinite."""
    num_failures: int = 0
    """In a row, with less than a steady while between them."""

    @property
    def port(self) -> int:
        return int(self.facts["port"])

    @property
    def status(self) -> int | None:
        """Exit status; minus the signal's number when one ended it; None while it runs."""
        return self.process.poll()

    def is_ready(self, now: float) -> bool:
        """Whether the child has been seen ready; looks, until it was. `now`: monotonic seconds."""
        if self.ready_at is None and (facts := self.look()) is not None:
            self.facts, self.ready_at = facts, now
        return self.ready_at is not None

    def failure(self) -> ChildFailed:
        text = f"{self.name} ended with status {self.status}{'' if self.ready_at is not None else ' before it served'}"
        if self.log is None:
            return ChildFailed(f"{text}; its last words stand above")
        lines = self.log.read_text(errors="replace").splitlines()[-_SHOWN_LOG_LINES:] if self.log.exists() else []
        return ChildFailed(f"{text}; the end of its log {self.log}:" + "".join(f"\n    {line}" for line in lines))


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
        logged: bool = True,
        look: Callable[[], dict[str, Any] | None] | None = None,
    ) -> Child:
        """Start `argv`; `{ready_file}` in it is replaced. `environ` is added to this process's environment.

        `logged`: to a file of its own, else it writes where this process does. `look`: how readiness is seen in a
        program that writes no ready file.
        """
        ready_file = self._folder / f"{name}.ready"
        log = self._folder / f"{name}.log" if logged else None
        program = [part.replace("{ready_file}", str(ready_file)) for part in argv]
        inherited = {name: value for name, value in os.environ.items() if name not in self._own_variables}
        environ = {**inherited, **(environ or {})}

        def start() -> subprocess.Popen[bytes]:
            ready_file.unlink(missing_ok=True)
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(niceness), str(os.getpid())]
            with log.open("ab") if log is not None else nullcontext() as output:
                process = subprocess.Popen(
                    [*launcher, *program],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=None if output is None else subprocess.STDOUT,
                    env=environ,
                    start_new_session=True,
                )
            _log.info("child started", extra={"child": name, "child_pid": process.pid})
            return process

        child = Child(name, start, look or (lambda: _read_facts(ready_file)), log, essential, start())
        self.children.append(child)
        return child

    def service(self, name: str, role: str, flags: Sequence[str], **options: Any) -> Child:
        """Start `python -m services.<role>`."""
        argv = [sys.executable, "-m", f"services.{role}", *flags, "--ready-file", "{ready_file}"]
        return self.spawn(name, argv, **options)

    def wait_ready(self, children: Iterable[Child], timeout_s: float) -> None:
        """Wait until each child has written its ready file. Raises ChildFailed, DeadlineExceeded."""
        waiting = list(children)
        started = time.monotonic()
        told = 0
        while waiting:
            for child in list(waiting):
                if child.is_ready(time.monotonic()):
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

    def check(self, now: float | None = None) -> None:
        """Note children that have got ready, report those that have ended, start again those to be replaced once their
        pause is over.

        `now`: monotonic seconds. Raises ChildFailed when one has ended that was essential and is not replaced.
        """
        now = time.monotonic() if now is None else now
        for child in self.children:
            if child.status is None:
                child.is_ready(now)
            elif child.start_at is None:
                self._note_end(child, now)
            elif now >= child.start_at:
                child.process, child.start_at = child.start(), None

    def _note_end(self, child: Child, now: float) -> None:
        if not child.replaced:
            child.start_at = math.inf
            if child.essential:
                raise child.failure()
            self._say(f"{child.name} ended with status {child.status}; the others go on (log: {child.log})")
            return
        steady = child.ready_at is not None and now - child.ready_at >= _STEADY_S
        child.num_failures = 0 if steady else child.num_failures + 1
        pause = 0.0 if steady else min(_BACKOFF_MIN_S * 2.0 ** min(child.num_failures - 1, 16), _BACKOFF_MAX_S)
        child.facts, child.ready_at, child.start_at = {}, None, now + pause
        self._say(f"{child.name} ended with status {child.status} and starts again in {pause:g} s")

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

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def _read_facts(ready_file: Path) -> dict[str, Any] | None:
    return json.loads(ready_file.read_text()) if ready_file.exists() else None


def _signal(child: Child, number: signal.Signals) -> None:
    """Signal a child by process id, and only while the process is ours to signal: not yet waited for."""
    if child.status is None:
        child.process.send_signal(number)
