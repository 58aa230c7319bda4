"""Sessions of a draft model, and the feed that runs them.

`NeuralSession`: of one request the prefix, the path drafted after it, and the cache of both. `SessionFeed` feeds all
sessions of a draft model in batches, through a KV cache that may not have room for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moot.core.errors import NoCapacity
from moot.core.history import History, HistoryOnPath
from moot.core.types import ROOT, SamplingParams
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner

Drafted = tuple[int, int]
"""A token's id and its confidence byte."""


@dataclass(slots=True, eq=False)
class NeuralSession:
    """One request on the draft model. Invariant: the cache holds the KV of the first `cache.length` ids of `tokens` +
    the ids of `ahead`."""

    params: SamplingParams
    cache: KvCache
    tokens: list[int] = field(default_factory=list)
    """The prefix."""
    ahead: list[Drafted] = field(default_factory=list)
    """Drafted after the prefix."""
    stopped: bool = False
    """Nothing can be drafted after `ahead`: too unlikely, not finite, ended, or no capacity."""
    history: History | None = None
    highest_id: int = -1
    stage: Any = None
    """The session of the cheaper stage, which is told the prefix less the tentative ids."""
    num_tentative: int = 0
    """Of the prefix's last ids, those that are there for one question only."""

    @property
    def num_missing(self) -> int:
        """Ids of the path, less its last one, that are not in the cache; 0 where nothing can be drafted after it."""
        return 0 if self.stopped else len(self.tokens) + len(self.ahead) - 1 - self.cache.length

    def path(self, start: int) -> list[int]:
        """Ids of prefix + drafted path from position `start` on."""
        drafted = [token for token, _ in self.ahead]
        return self.tokens[start:] + drafted if start < len(self.tokens) else drafted[start - len(self.tokens) :]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Lengthen the prefix. What was drafted stays as far as it is what was committed, or goes on after it."""
        followed = 0
        for (drafted, _), token in zip(self.ahead, token_ids, strict=False):
            if drafted != token:
                break
            followed += 1
        if followed < min(len(self.ahead), len(token_ids)):
            self.cache.crop(min(self.cache.length, len(self.tokens) + followed))
            self.ahead = []
        else:
            self.ahead = self.ahead[followed:]
        # What ended the path may still lie ahead; it is found again when it is reached.
        self.stopped = self.stopped and bool(self.ahead)
        self.tokens.extend(token_ids)
        self.highest_id = max(self.highest_id, *token_ids)
        if self.history is not None:
            self.history.append(token_ids)

    def history_with(self, path: Sequence[int]) -> HistoryOnPath | None:
        """What penalties after `path` count; None where nothing is penalised."""
        if self.history is None:
            return None
        return self.history.with_path([*self.tokens[len(self.tokens) - self.num_tentative :], *path])

    def suppose(self, token_ids: Sequence[int]) -> None:
        """Lengthen the prefix for one question; `take_back` ends it. Counts for penalties stay those of the prefix."""
        if token_ids:
            history, self.history, highest = self.history, None, self.highest_id
            self.commit(token_ids)
            self.history, self.highest_id = history, highest
            self.num_tentative = len(token_ids)

    def take_back(self) -> None:
        """What was supposed lies ahead of the prefix from now on, and what was drafted after it behind that."""
        if self.num_tentative:
            supposed = self.tokens[-self.num_tentative :]
            del self.tokens[-self.num_tentative :]
            self.ahead = [*((token, 0) for token in supposed), *self.ahead]
            self.num_tentative = 0

    def drop_path(self) -> None:
        """Forget what was drafted; the prefix's last id is to be fed again, for the row that branches start from."""
        self.cache.crop(min(self.cache.length, max(len(self.tokens) - 1, 0)))
        self.ahead, self.stopped = [], False

    def next_chunk(self, limit: int) -> SequenceInput:
        """Feeds up to `limit` of the missing ids."""
        return SequenceInput(self.cache, self.path(self.cache.length)[: min(self.num_missing, limit)])

    def last_id(self, guess: Sequence[int] = ()) -> SequenceInput:
        """Feeds the path's end, whose row says what comes next; again where a draft had stopped right behind it.

        `guess`: fed behind it, with a row for each id of it.
        """
        self.cache.crop(min(self.cache.length, len(self.tokens) + len(self.ahead) - 1))
        token_ids = [*self.path(self.cache.length), *guess]
        return SequenceInput(self.cache, token_ids, None, range(len(token_ids)))

    def tree(self, paths: Sequence[Sequence[Drafted]], live: Sequence[int]) -> SequenceInput:
        """Feeds the paths `live` after the prefix as one tree; logits wanted at their ends."""
        token_ids: list[int] = []
        parents: list[int] = []
        ends: list[int] = []
        for index in live:
            parent = ROOT
            for token, _ in paths[index]:
                token_ids.append(token)
                parents.append(parent)
                parent = len(token_ids) - 1
            ends.append(parent)
        return SequenceInput(self.cache, token_ids, parents, ends)


class SessionFeed:
    """The feed of all open sessions of one runner. `chunk`: ids of one session fed in one forward."""

    def __init__(self, runner: ModelRunner, chunk: int) -> None:
        self._runner = runner
        self._chunk = chunk
        # Least recently used first: whose cache goes when there is no room.
        self._sessions: dict[int, NeuralSession] = {}

    def add(self, session: NeuralSession) -> None:
        self._sessions[id(session)] = session

    def use(self, session: NeuralSession) -> None:
        """Note that the session is asked for: its cache is the last to go."""
        self._sessions[id(session)] = self._sessions.pop(id(session))

    def remove(self, session: NeuralSession) -> None:
        session.cache.free()
        self._sessions.pop(id(session), None)

    def prefill(self, sessions: Sequence[NeuralSession]) -> None:
        """Feed every path up to its last id, in chunks, all sessions together."""
        behind = list(sessions)
        while behind:
            behind = self.prefill_chunks(behind, sessions)

    def prefill_chunks(self, sessions: Sequence[NeuralSession], busy: Sequence[NeuralSession]) -> list[NeuralSession]:
        """Feed the next chunk of each path, in one forward. Returns those that lack more."""
        work = [(session, session.next_chunk(self._chunk)) for session in sessions if session.num_missing > 0]
        for session, item, logits in self.forward(work, busy):
            if logits is not None:
                session.cache.commit(range(len(item.token_ids)))
        return [session for session, _ in work if session.num_missing > 0]

    def forward(
        self,
        work: Sequence[tuple[NeuralSession, SequenceInput]],
        busy: Sequence[NeuralSession],
        ahead: Collection[int] = (),
    ) -> list[tuple[NeuralSession, SequenceInput, Tensor | None]]:
        """One ragged forward of some of `busy`, the sessions drafted for at present.

        Without room, those `ahead` (identities) go without this time; then others lose their caches; then the last of
        `busy` goes without, whether or not it is in `work`.
        """
        served = list(work)
        results: list[Tensor] = []
        while served:
            try:
                results = self._runner.forward([item for _, item in served])
                break
            except NoCapacity:
                if any(id(session) in ahead for session, _ in served):
                    served = [(session, item) for session, item in served if id(session) not in ahead]
                    continue
                kept = set(map(id, busy))
                idle = next((s for s in self._sessions.values() if id(s) not in kept and s.cache.num_slots), None)
                if idle is None:
                    idle = next(session for session in reversed(busy) if not session.stopped)
                    idle.stopped = True
                    served = [(session, item) for session, item in served if session is not idle]
                idle.cache.free()
        logits = dict(zip((id(session) for session, _ in served), results, strict=True))
        return [(session, item, logits.get(id(session))) for session, item in work]
