"""The drafter `suffix` (SuffixDecoding, arXiv 2411.04975; REST, arXiv 2311.08252): what followed the longest match.

Own text: an online suffix automaton over the last `max_indexed_tokens` of prompt + output, which has the longest
earlier match of the text's end in constant time. Where the shared datastore knows a longer suffix of the prefix than
the own text does, its continuation is the proposal (else the next alternative).

The automaton's construction is after Blumer et al. (1985). State 0 is the empty string. A state stands for all strings
with the same set of end positions; `length` is that of the longest, `link` leads to the longest suffix with more end
positions.

Confidence byte: 16 * level + floor(15 * share). Level 0 to 7 grows with the match length (1, 2, 3, 4, 5, 7, 10, 16
tokens and more); the own text's levels are 8 higher. Share: the part of the match's occurrences that went on so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moot.core.options import option
from moot.core.types import Proposal
from moot.drafters.interface import Candidates, IndexingOptions, ModelFreeDrafter, PrefixSession, window_start
from moot.drafters.lookup.datastore import DEPTH, Datastore
from moot.shipped import locate

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


_LEVELS = (1, 2, 3, 4, 5, 7, 10, 16)
_OWN = 8


def confidence_byte(match_length: int, share: float, level_offset: int = 0) -> int:
    return 16 * (bisect_right(_LEVELS, max(match_length, 1)) - 1 + level_offset) + int(15 * min(share, 1.0))


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(IndexingOptions):
    min_match: int = option(1, help="shortest match that is used, in tokens", minimum=1)
    prefer: str = option("frequent", help="which continuation of a match goes first", choices=("frequent", "recent"))
    datastore: Path | None = option(None, help="folder of a shared datastore made by `moot index` (read only)")


@dataclass(slots=True)
class SuffixSession(PrefixSession):
    start: int = 0
    """Position of the first indexed token."""
    tokens: list[int] = field(default_factory=list)
    """From `start` on."""
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)


class SuffixDrafter(ModelFreeDrafter[SuffixSession]):
    kind = "suffix"
    new_session = SuffixSession

    def __init__(self, options: SuffixOptions) -> None:
        super().__init__(options)
        self._min_match = options.min_match
        self._window = options.max_indexed_tokens
        self._frequent = options.prefer == "frequent"
        self._datastore = Datastore(locate(options.datastore)) if options.datastore else None
        self.tokenizer_fingerprint = self._datastore.tokenizer_fingerprint if self._datastore else ""

    def append(self, session: SuffixSession, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        session.tokens.extend(token_ids)
        start = window_start(session.length, self._window)
        if start != session.start:
            session.tokens = session.tokens[start - session.start :]
            session.start, session.automaton = start, SuffixAutomaton()
        for token in session.tokens[len(session.automaton) :]:
            session.automaton.append(token)

    def chains(self, session: SuffixSession, num_tokens: int, width: int) -> Iterator[Proposal]:
        automaton = session.automaton
        own_length = automaton.length[automaton.match()]
        stored, stored_length = self._stored(session.tokens, num_tokens)
        if stored is not None and stored_length > own_length:
            yield stored
        yield from self._own(automaton, num_tokens, width)
        if stored is not None and stored_length <= own_length:
            yield stored

    def ids_after(self, session: SuffixSession, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        if not path:
            return super().ids_after(session, path, num_tokens)
        automaton = session.automaton
        state, own_length = automaton.follow(path)
        stored, stored_length = self._stored([*session.tokens[-DEPTH:], *path], num_tokens)
        if stored is not None and stored_length > own_length:
            return stored.token_ids
        if own_length < self._min_match:
            return ()
        return self._walk(automaton, state, self._best(automaton, state), num_tokens).token_ids

    def _stored(self, tokens: Sequence[int], num_tokens: int) -> tuple[Proposal | None, int]:
        if self._datastore is None:
            return None, 0
        found = self._datastore.continuation(tokens, num_tokens)
        if found.match_length < self._min_match or not found.token_ids:
            return None, 0
        confidences = tuple(confidence_byte(found.match_length, share) for share in found.shares)
        return Proposal(found.token_ids, confidences), found.match_length

    def _own(self, automaton: SuffixAutomaton, num_tokens: int, width: int) -> Iterator[Proposal]:
        """One chain per first id: the continuations of the longest match, then those of its shorter suffixes."""
        state = automaton.match()
        first_ids: set[int] = set()
        while automaton.length[state] >= self._min_match and len(first_ids) < width:
            for token in self._ranked(automaton, state) if width > 1 else (self._best(automaton, state),):
                if token is not None and token not in first_ids and len(first_ids) < width:
                    first_ids.add(token)
                    yield self._walk(automaton, state, token, num_tokens)
            state = automaton.shorter(state)

    def _ranked(self, automaton: SuffixAutomaton, state: int) -> list[int]:
        return sorted(automaton.next[state], key=self._rank(automaton, state), reverse=True)

    def _best(self, automaton: SuffixAutomaton, state: int) -> int | None:
        children = automaton.next[state]
        if len(children) == 1:
            return next(iter(children))
        return max(children, key=self._rank(automaton, state), default=None)

    def _rank(self, automaton: SuffixAutomaton, state: int) -> Callable[[int], tuple[int, int]]:
        """By what the continuations of a state are ordered. No two of them end at the same place."""
        children, count, end = automaton.next[state], automaton.count, automaton.end
        if self._frequent:
            return lambda token: (count[children[token]], end[children[token]])
        return lambda token: (end[children[token]], 0)

    def _walk(self, automaton: SuffixAutomaton, state: int, token: int | None, num_tokens: int) -> Proposal:
        """Follow the automaton from `state`; at the end of the text go on from the longest suffix that goes on."""
        ids: list[int] = []
        confidences: list[int] = []
        match_length = automaton.length[state]
        while len(ids) < num_tokens:
            while token is None:
                state = automaton.shorter(state)
                match_length = automaton.length[state]
                if state == ROOT_STATE or match_length < self._min_match:
                    return Proposal(tuple(ids), tuple(confidences))
                token = self._best(automaton, state)
            child = automaton.next[state][token]
            share = automaton.count[child] / max(automaton.count[state], 1)
            ids.append(token)
            confidences.append(confidence_byte(match_length, share, _OWN))
            state = child
            token = self._best(automaton, state)
        return Proposal(tuple(ids), tuple(confidences))

    def close(self, session: SuffixSession) -> None:
        session.start, session.tokens, session.automaton = session.length, [], SuffixAutomaton()
