"""The parent's half of the protocol: one peer as a child process, stopped while others have their turns."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAST_LINES = 8


class PeerFailed(Exception):
    """A peer could not be installed, did not start, did not answer in time or answered with an error."""


class Child:
    """Starts at once. Between `ask`s its whole process group stands still, so that it takes no time from others."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environ: Mapping[str, str],
        start_timeout_s: float,
        may_be_paused: bool = True,
    ) -> None:
        self._may_be_paused = may_be_paused
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environ},
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self._next(start_timeout_s)
        except PeerFailed:
            self.close()
            raise
        self.pause()

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        """Answers in the order of the prompts. Raises PeerFailed."""
        self._signal(signal.SIGCONT)
        try:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps(request) + "\n")
                self._process.stdin.flush()
            except OSError as error:
                raise PeerFailed(self._last_lines("has ended")) from error
            answers: list[dict[str, Any]] = self._next(timeout_s)["answers"]
            if len(answers) != len(request["prompts"]):
                raise PeerFailed(f"{len(answers)} answers to {len(request['prompts'])} prompts")
            return answers
        finally:
            self.pause()

    def pause(self) -> None:
        if self._may_be_paused:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End of stdin ends a peer; one that goes on is killed."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerFailed(self._last_lines(f"no answer within {timeout_s:g} s")) from None
        if line is None:
            raise PeerFailed(self._last_lines("ended"))
        try:
            message: dict[str, Any] = json.loads(line)
        except ValueError as error:
            raise PeerFailed(f"answered something that is not JSON: {line[:200]}") from error
        if "error" in message:
            raise PeerFailed(str(message["error"]))
        return message

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _last_lines(self, what: str) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return "\n".join([what, *lines[-LAST_LINES:]])
