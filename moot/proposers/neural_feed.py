"""Feeds the sessions of a draft model together, through a KV cache that may not have room for all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from moot.core.errors import NoCapacity
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.proposers.neural_session import NeuralSession


class SessionFeed:
    """All open sessions of one runner. `chunk`: ids of one session fed in one forward."""

    def __init__(self, runner: ModelRunner, chunk: int) -> None:
        self._runner = runner
        self._chunk = chunk
        # Least recently used first: whose cache goes when there is no room.
        self._sessions: dict[int, NeuralSession] = {}

    def add(self, session: NeuralSession) -> None:
        self._sessions[id(session)] = session

    def use(self, session: NeuralSession) -> None:
        """It is asked for: its cache goes last."""
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
