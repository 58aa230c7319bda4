"""Drafters in the router's process: the kinds that need no model cost less than the hop to a pod would."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from moot.core.types import Proposal
from moot.drafters.interface import Ask, Drafter
from moot.runtime.metrics import Metrics
from services.router.generation.ports import Prefix, ProposalCollector
from services.router.peers.outlier_ejection import EjectionPolicy, OutlierEjection

_log = logging.getLogger("moot.router.drafters")

SLICE_TOKENS = 2048
"""Ids that a drafter is told at a time, so that a long prompt never holds the event loop for long."""


class LocalPool:
    """One drafter in this process, which serves every request of this router. Same interface as a pool of replicas."""

    def __init__(self, drafter_id: str, drafter: Drafter[Any], failures: EjectionPolicy, metrics: Metrics) -> None:
        self.drafter_id = drafter_id
        self.held_drafter = drafter
        self.metrics = metrics
        metrics.drafter_ejections.labels(drafter_id)
        self.num_sessions = 0
        self._failures = OutlierEjection(failures)
        self._ejected_until = float("-inf")

    @property
    def wants_top_candidates(self) -> bool:
        return self.held_drafter.kind == "recycling"

    @property
    def is_available(self) -> bool:
        return asyncio.get_running_loop().time() >= self._ejected_until

    def serves(self, prefix: Prefix) -> bool:
        return self.held_drafter.serves(prefix.request_context)

    def drafter(self, prefix: Prefix) -> LocalDrafter:
        return LocalDrafter(self, prefix)

    def answered(self) -> None:
        self._failures.answered()

    def malformed(self, reason: str, asked_at: float) -> None:
        self.metrics.proposals_dropped.labels(self.drafter_id, reason).inc()
        now = asyncio.get_running_loop().time()
        duration = self._failures.malformed(asked_at, now)
        if duration is not None:
            _log.warning("drafter ejected", extra={"drafter": self.drafter_id, "reason": reason, "seconds": duration})
            self.metrics.drafter_ejections.labels(self.drafter_id).inc()
            self._ejected_until = now + duration


class LocalDrafter:
    """A local drafter as the `RequestDrafter` port of one request. It answers within `ask`."""

    __slots__ = ("_asked_at", "_known_length", "_pool", "_prefix", "_session", "_slices")

    def __init__(self, pool: LocalPool, prefix: Prefix) -> None:
        self._pool = pool
        self._prefix = prefix
        self._session: Any = None
        self._known_length = -1
        self._asked_at = 0.0
        self._slices: asyncio.Handle | None = None

    @property
    def drafter_id(self) -> str:
        return self._pool.drafter_id

    def prepare(self) -> None:
        if self._slices is None and len(self._prefix) < self._pool.held_drafter.context_limit:
            self._slices = asyncio.get_running_loop().call_soon(self._go_on)

    def ask(self, box: ProposalCollector, num_speculative_tokens: int, width: int) -> bool:
        pool, length = self._pool, len(self._prefix)
        num_tokens = min(num_speculative_tokens, pool.held_drafter.context_limit - length)
        if num_tokens < 1 or not pool.is_available:
            return False
        self._asked_at = asyncio.get_running_loop().time()
        try:
            if not self._catch_up():
                return False
            (chains,) = pool.held_drafter.propose([Ask(self._session, num_tokens, width)])
        except Exception:  # noqa: BLE001 - a kind's mistake must not reach another request; this one goes on without it
            _log.exception("drafter failed", extra={"drafter": self.drafter_id})
            self._close()
            pool.malformed("failed", self._asked_at)
            return False
        box.expect(self)
        box.cast(self, tuple(Proposal(chain.token_ids, chain.confidences, self.drafter_id) for chain in chains))
        return True

    @property
    def answer_seconds(self) -> float:
        return 0.0

    def missed(self) -> None:
        """Cannot be: it answers at once."""

    def answered(self) -> None:
        self._pool.answered()

    def malformed(self, reason: str) -> None:
        self._pool.malformed(reason, self._asked_at)

    def end(self, *, aborted: bool) -> None:
        self._close()

    def _catch_up(self) -> bool:
        """Tell the drafter the next slice of what it does not know yet. True once it knows the whole prefix."""
        prefix, drafter = self._prefix, self._pool.held_drafter
        if self._known_length < 0:
            first = [*prefix.prompt_token_ids, *prefix.output_token_ids][:SLICE_TOKENS]
            self._session = drafter.open_request(first, prefix.params, prefix.request_context)
            self._pool.num_sessions += 1
            self._known_length = len(first)
        elif self._known_length < len(prefix.prompt_token_ids):
            part = prefix.prompt_token_ids[self._known_length :][:SLICE_TOKENS]
            drafter.extend(self._session, part)
            self._known_length += len(part)
        elif self._known_length < len(prefix):
            new = prefix.since(self._known_length)[:SLICE_TOKENS]
            rows = prefix.candidates_since(self._known_length)[:SLICE_TOKENS]
            drafter.extend(self._session, new, rows)
            self._known_length += len(new)
        if self._known_length == len(prefix):
            return True
        if self._slices is None:
            self._slices = asyncio.get_running_loop().call_soon(self._go_on)
        return False

    def _go_on(self) -> None:
        self._slices = None
        try:
            self._catch_up()
        except Exception:  # noqa: BLE001 - as in ask
            _log.exception("drafter failed", extra={"drafter": self.drafter_id})
            self._close()
            self._pool.malformed("failed", self._asked_at)

    def _close(self) -> None:
        if self._slices is not None:
            self._slices.cancel()
            self._slices = None
        if self._known_length >= 0:
            self._known_length = -1
            self._pool.num_sessions -= 1
            session, self._session = self._session, None
            self._pool.held_drafter.close(session)
