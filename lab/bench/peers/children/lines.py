"""The child's half of the protocol: requests as JSON lines on stdin, answers on what was stdout. Standard library only.

A request is {"variant", "prompts": [[id]], "texts": [str], "max_tokens", "stop_token_ids"}; its answer
{"answers": [{"token_ids", "first_s", "total_s"}]}, seconds since the request, or {"error"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

StreamedAnswer = dict[str, Any]


class Clock:
    """Notes when the first and the last tokens of one answer came."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._first_s: float | None = None

    def tick(self) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter() - self._started

    def answer(self, token_ids: Sequence[int]) -> StreamedAnswer:
        total_s = time.perf_counter() - self._started
        return {"token_ids": list(token_ids), "first_s": self._first_s or total_s, "total_s": total_s}


def serve(answer: Callable[[dict[str, Any]], list[StreamedAnswer]], **ready: Any) -> None:
    """Answer until stdin ends. An error of one request is told in its answer, and the next one is tried."""
    _say({"ready": True, **ready})
    for line in sys.stdin:
        try:
            _say({"answers": answer(json.loads(line))})
        except Exception:  # noqa: BLE001  Whatever a peer's library raises is told to the parent.
            _say({"error": "".join(traceback.format_exc().splitlines(keepends=True)[-6:])})


def _say(message: dict[str, Any]) -> None:
    _out.write(json.dumps(message) + "\n")
    _out.flush()


if sys.platform == "linux":
    # PR_SET_PDEATHSIG. A peer that is stopped when its parent dies would stay for ever: only SIGKILL ends it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

# Libraries print on stdout as they like; what they print goes to stderr, so that only answers are read as answers.
_out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
