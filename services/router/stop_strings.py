"""Finding stop strings in a text that arrives character by character (Aho and Corasick's automaton)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

START = 0
"""State before any character."""


class StopStrings:
    """An immutable automaton over the stop strings of one request, shared by its choices.

    A state stands for the longest end of the text so far that begins a stop string. Per state: `matched[state]` is the
    longest stop string that ends here (None: none does), `held[state]` how many last characters may still become
    part of one.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.matched: list[str | None] = [None]
        self.held: list[int] = [0]
        depth = [0]
        for stop in stops:
            state = START
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(self._next)
                    self._next.append({})
                    self.matched.append(None)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self.matched[state] = stop
        self._fallback = [START] * len(self._next)
        self.held = [0] * len(self._next)
        queue = deque(self._next[START].values())
        for state in queue:
            self.held[state] = depth[state] if self._next[state] else 0
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fallback = self._fallback[child] = self.step(self._fallback[state], char)
                self.matched[child] = self.matched[child] or self.matched[fallback]
                self.held[child] = depth[child] if self._next[child] else self.held[fallback]
                queue.append(child)

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, char: str) -> int:
        """The state after `char`: amortised constant time, because every fallback undoes an earlier step down."""
        while state != START and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, START)
