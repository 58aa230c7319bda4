"""The drafters attached to this verifier: what they are asked after a step, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

from moot.core.errors import is_out_of_memory
from moot.core.types import ROOT, Proposal
from moot.drafters.attached.attached_interface import NO_GUESSES, AttachedAsk, AttachedDrafter, Guesses
from moot.model.cache.kv_cache import depths_of
from moot.model.sampling.logits import joined
from moot.model.sampling.sampler import Sampler
from moot.runtime.faults import act, fault
from moot.runtime.metrics import Metrics
from services.verifier.sessions import Session
from services.verifier.walks import DeviceLost, Outcome, Sampled, is_device_lost

_log = logging.getLogger("moot.verifier")

Answers = tuple[int | None, ...]
ResultT = TypeVar("ResultT")


class AttachedDrafters:
    """The attached drafters of a verifier. Not thread-safe: the compute thread owns it; `drafters` is replaced, never
    changed, and read from anywhere."""

    def __init__(
        self, drafters: Sequence[AttachedDrafter], sampler: Sampler, max_draft_tokens: int, metrics: Metrics
    ) -> None:
        """`max_draft_tokens`: rows of a step that one session may have, draft and guesses together."""
        self.drafters = tuple(drafters)
        self._sampler = sampler
        self._max_draft_tokens = max_draft_tokens
        self._metrics = metrics
        self._guessed: dict[int, list[tuple[str, int]]] = {}
        """By the session's arrival: the drafters that have guessed, and how many tokens each, in their order in the
        step."""

    def guess(self, session: Session) -> None:
        """Add to the session's new work what its drafters want to be fed with it. Raises DeviceLost only."""
        work = session.work
        self._guessed.pop(session.arrival, None)
        if work is None or not _is_wanted(session):
            return
        ids: list[int] = []
        parents: list[int] = []
        guessed: list[tuple[str, int]] = []
        for drafter in self._of(session):
            room = self._max_draft_tokens - len(work.fed_nodes) - len(ids)
            guesses = self._guarded(drafter, [session], partial(_guesses, drafter, session, room))
            if guesses is not None and guesses.token_ids:
                guessed.append((drafter.drafter_id, len(guesses.token_ids)))
                parents += [parent if parent == ROOT else len(ids) + parent for parent in guesses.parents]
                ids += guesses.token_ids
        if ids:
            self._guessed[session.arrival] = guessed
            session.work = work.with_guesses(Guesses(tuple(ids), tuple(parents)))

    def propose(self, outcomes: Sequence[Outcome]) -> dict[int, tuple[Proposal, ...]]:
        """Proposals for what follows the tokens that a step has committed, by the session's arrival. Raises DeviceLost
        only.

        One pass per drafter, for all sessions that want it; empty, and nothing computed, where none does.
        """
        sampled = [one for one in outcomes if isinstance(one, Sampled) and _is_open(one)] if self.drafters else []
        if not sampled:
            return {}
        found: dict[int, list[Proposal]] = {one.session.arrival: [] for one in sampled}
        try:
            answers = self._answers(sampled)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._abstain()
            return {}
        for drafter in self.drafters:
            name = drafter.drafter_id
            wanting = [one for one in sampled if name in one.session.inside_drafter_ids]
            asks = [_ask_of(one, answers.get((one.session.arrival, name), ())) for one in wanting]
            if not asks:
                continue
            sessions = [one.session for one in wanting]
            chains = self._guarded(drafter, sessions, partial(drafter.propose, asks))
            for session, ask, own in zip(sessions, asks, chains or (), strict=False):
                found[session.arrival] += [Proposal(one.token_ids, one.confidences, name) for one in own[: ask.width]]
        return {arrival: tuple(proposals) for arrival, proposals in found.items()}

    def end(self, session: Session) -> None:
        """Forget a session, whatever became of it."""
        self._guessed.pop(session.arrival, None)
        for drafter in self._of(session):
            self._guarded(drafter, [], partial(drafter.end, session.arrival))

    def _of(self, session: Session) -> list[AttachedDrafter]:
        wanted = session.inside_drafter_ids
        return [drafter for drafter in self.drafters if drafter.drafter_id in wanted] if wanted else []

    def _answers(self, sampled: Sequence[Sampled]) -> Mapping[tuple[int, str], Answers]:
        """The target's likeliest ids after each drafter's guesses, by the session's arrival and the drafter."""
        found: dict[tuple[int, str], Answers] = {}
        fed = [(one.session.arrival, rows) for one in sampled if (rows := one.guess_logits) is not None]
        if fed:
            likeliest = iter(self._sampler.greedy_rows(joined([rows for _, rows in fed])))
            for arrival, _ in fed:
                for name, count in self._guessed[arrival]:
                    found[arrival, name] = tuple(next(likeliest) for _ in range(count))
        return found

    def _guarded(
        self, drafter: AttachedDrafter, sessions: Sequence[Session], call: Callable[[], ResultT]
    ) -> ResultT | None:
        """The result of a call of a drafter, None where it fails: then the drafter is not asked again, unless there was
        no memory."""
        name = drafter.drafter_id
        try:
            for session in sessions:
                act(failing := fault("verifier.attached", session.request_id))
                if failing and failing.action == "raise":
                    raise RuntimeError("fault point verifier.attached")
                if failing and failing.action == "memory" and len(sessions) > int(failing.argument):
                    raise torch.OutOfMemoryError("fault point verifier.attached")
            return call()
        except Exception as error:  # a drafter's mistake ends the drafter, and no session
            if is_device_lost(error):
                raise DeviceLost(str(error)) from error
            if is_out_of_memory(error):
                error.__traceback__ = None
                self._abstain(name)
                return None
            _log.exception("a drafter failed and is not asked again", extra={"drafter": name})
            self._metrics.proposals_dropped.labels(name, "failed").inc()
            self.drafters = tuple(one for one in self.drafters if one is not drafter)
            return None

    def _abstain(self, *names: str) -> None:
        """Let these drafters, or all, abstain in this step: there is no memory for it."""
        names = names or tuple(drafter.drafter_id for drafter in self.drafters)
        _log.warning("no memory for drafters in this step", extra={"drafters": ", ".join(names)})
        self._metrics.out_of_memory.labels("drafter").inc()
        for name in names:
            self._metrics.proposals_dropped.labels(name, "memory").inc()


def _is_wanted(session: Session) -> bool:
    """Whether a token may be proposed that could be accepted: the last one is never drafted."""
    return min(session.num_inside_tokens, session.inside_width, session.max_new - 1) > 0


def _is_open(outcome: Sampled) -> bool:
    session = outcome.session
    return outcome.walk.finish is None and bool(session.inside_drafter_ids) and _is_wanted(session)


def _guesses(drafter: AttachedDrafter, session: Session, room: int) -> Guesses:
    """The guesses of a drafter, checked. Raises ValueError for what would break a step."""
    depth = session.max_new - 1
    guesses = drafter.guess(session.arrival, session.token_ids, room, depth) if room > 0 else NO_GUESSES
    depths = depths_of(guesses.parents)
    if not len(depths) == len(guesses.token_ids) <= max(room, 0) or max(depths, default=-1) >= depth:
        raise ValueError("more guesses than there is room for")
    return guesses


def _ask_of(outcome: Sampled, answers: Answers) -> AttachedAsk:
    session = outcome.session
    if outcome.state is None:
        raise RuntimeError("no hidden states are kept")
    num_tokens = min(session.num_inside_tokens, session.max_new - 1)
    return AttachedAsk(
        session.token_ids,
        session.params,
        session.history,
        outcome.state,
        num_tokens,
        session.inside_width,
        session.arrival,
        answers,
        session.cache,
    )
