"""How tests wait: for what must come, not for a time. A loaded machine makes a test slower, and nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

GIVE_UP_S = 90.0
"""When a wait for what must come is given up. It keeps a hang from lasting for ever, and nothing else: no rule
is measured by it, and no test that passes is slower for it. Below pytest's own limit, which says less of what hung."""


async def eventually(holds: Callable[[], object], give_up_s: float = GIVE_UP_S) -> None:
    """Returns once `holds` is true; TimeoutError when it does not come to be. For what tells nobody that it changed:
    peers, threads, processes."""
    async with asyncio.timeout(give_up_s):
        while not holds():  # noqa: ASYNC110 - what it looks at sets no event
            await asyncio.sleep(0.005)


def until(value: Callable[[], T], what: str, give_up_s: float = GIVE_UP_S, poll_s: float = 0.02) -> T:
    """The first true value; an AssertionError that says `what` did not come."""
    deadline = time.monotonic() + give_up_s
    while not (found := value()):
        assert time.monotonic() < deadline, f"not within {give_up_s:g} s: {what}"
        time.sleep(poll_s)
    return found


class LeapingLoop(asyncio.SelectorEventLoop):
    """Its clock can be set forward: what would be due in a minute is due now. For rules that are a duration of the
    product: long enough not to end by itself on any machine, and over when the test says so."""

    _ahead_s = 0.0

    def time(self) -> float:
        return super().time() + self._ahead_s

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds
