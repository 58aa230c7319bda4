"""An online suffix automaton over token ids: the longest earlier match of the text's end in constant time.

Construction after Blumer et al. (1985). State 0 is the empty string. A state stands for all strings with the same
set of end positions; `length` is that of the longest, `link` leads to the longest suffix with more end positions.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT_STATE = 0


class SuffixAutomaton:
    """Grows by one token at a time: amortised constant time, at most two states per token.

    `count` and `end` of a state: occurrences, and the end of the most recent one. They are kept for the
    `max_updates` longest suffixes of the text at each append; shorter ones of very periodic text may lag behind.
    """

    __slots__ = ("_last", "_max_updates", "_size", "count", "end", "length", "link", "next")

    def __init__(self, max_updates: int = 64) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.count = [0]
        self.end = [-1]
        self._last = ROOT_STATE
        self._size = 0
        self._max_updates = max_updates

    def __len__(self) -> int:
        """Tokens appended."""
        return self._size

    def append(self, token: int) -> None:
        nexts, link, length, count, end = self.next, self.link, self.length, self.count, self.end
        position, last = self._size, self._last
        current = self._add({}, length[last] + 1, 1, position)
        state = last
        while state >= 0 and token not in nexts[state]:
            nexts[state][token] = current
            state = link[state]
        if state < 0:
            link[current] = ROOT_STATE
        else:
            target = nexts[state][token]
            if length[target] != length[state] + 1:
                clone = self._add(dict(nexts[target]), length[state] + 1, count[target], end[target])
                link[clone] = link[target]
                link[target] = clone
                while state >= 0 and nexts[state].get(token) == target:
                    nexts[state][token] = clone
                    state = link[state]
                target = clone
            link[current] = target
        self._last = current
        self._size = position + 1
        ancestor = link[current]
        for _ in range(self._max_updates):
            if ancestor <= ROOT_STATE:
                break
            count[ancestor] += 1
            end[ancestor] = position
            ancestor = link[ancestor]

    def _add(self, transitions: dict[int, int], length: int, count: int, end: int) -> int:
        self.next.append(transitions)
        self.link.append(ROOT_STATE)
        self.length.append(length)
        self.count.append(count)
        self.end.append(end)
        return len(self.length) - 1

    def match(self) -> int:
        """The state of the longest suffix of the text that also occurred earlier; ROOT_STATE for none."""
        return max(self.link[self._last], ROOT_STATE)

    def follow(self, path: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of text + path that occurs in the text; the text stays as it is."""
        state, length = self._last, self.length[self._last]
        for token in path:
            while state > ROOT_STATE and token not in self.next[state]:
                state = self.link[state]
                length = self.length[state]
            if token in self.next[state]:
                state = self.next[state][token]
                length += 1
        return state, length

    def shorter(self, state: int) -> int:
        """The state of the longest proper suffix that occurred in more places."""
        return max(self.link[state], ROOT_STATE)
