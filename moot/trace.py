"""An opt-in record of what a process computes and when: one JSON object a line, in the file MOOT_TRACE_FILE names.

Off, and one look at a variable, unless the environment names a file. A line has `name`, `start_ns` and `end_ns` of
CLOCK_MONOTONIC, which all processes of a machine share, and the facts that the place gives. `{pid}` in the file's name
stands for the process id.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO


class _Span:
    __slots__ = ("_facts", "_name", "_output", "_start_ns")

    def __init__(self, output: TextIO, name: str, facts: dict[str, int]) -> None:
        self._output, self._name, self._facts = output, name, facts

    def __enter__(self) -> None:
        self._start_ns = time.monotonic_ns()

    def __exit__(self, *exc_info: object) -> None:
        times = {"name": self._name, "start_ns": self._start_ns, "end_ns": time.monotonic_ns()}
        self._output.write(json.dumps(times | self._facts) + "\n")


def open_trace(path: str) -> TextIO | None:
    """The file, written line by line so that it can be read while the process runs; None without a path."""
    return open(path.replace("{pid}", str(os.getpid())), "a", buffering=1) if path else None


_output = open_trace(os.environ.get("MOOT_TRACE_FILE", ""))
_NOTHING: AbstractContextManager[None] = nullcontext()


def span(name: str, **facts: int) -> AbstractContextManager[None]:
    """Records how long the body takes, also when it raises."""
    return _NOTHING if _output is None else _Span(_output, name, facts)
