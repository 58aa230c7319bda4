"""A simulated verifier: the project's own scheduler, a table of step times, and how its batches are put together."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moot.core.acceptance import Walk, walk
from moot.core.batching_delay import CPU_SHARE, BatchingDelay
from moot.core.options import option, part
from moot.core.scheduler import Batch, BatchOptions, Limits, Scheduler
from moot.core.types import Draft, Verification
from moot.simulation.events import Action, Cores, Timeline
from moot.simulation.machine_costs import StepCost
from moot.simulation.simulated_texts import SimulatedText

BATCHINGS = ("ready", "gathered", "whole", "dual", "free")
"""`ready`: a step takes what is there when it begins (a verifier on a GPU); `gathered`: after a moment's wait for
requests that usually answer so soon (on a CPU); `whole`: it waits for all of its requests; `dual`: for all of one half
of them, the halves taking turns while the other half drafts; `free`: every session in every step, drafts as they come
(free_verifiers.py)."""


@dataclass(frozen=True, slots=True)
class VerifierPlan:
    """The plan of a simulated verifier. `batching_delay_share`: part of a step's time that the batching delay may take.
    `threads`: compute threads, where cores are shared. `noise`: each step takes up to so much more or less, as a part
    of its time."""

    cost: StepCost
    batching: str = option(
        "ready",
        help="what a step takes: what is ready (a verifier on a GPU), that after a moment's wait for requests that "
        "usually come so soon (on a CPU), all requests, two halves in turns, or everybody always, drafts as they come",
        choices=BATCHINGS,
    )
    batching_delay_share: float = CPU_SHARE
    max_num_seqs: int = 64
    batches: BatchOptions = part(BatchOptions)
    kv_tokens: int = 1 << 20
    threads: int = 1
    noise: float = 0.0
    waits: bool = option(
        True, help="with free batching, a step waits for drafts that are about to come, where that pays"
    )


class SimulatedSession:
    """What the scheduler sees of a session's text, KV and draft."""

    __slots__ = ()
    length: int
    cached: int
    draft: Draft

    @property
    def num_kv_tokens(self) -> int:
        return self.length + len(self.draft)

    @property
    def num_missing(self) -> int:
        return self.length - self.cached

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft)


@dataclass(eq=False, slots=True)
class SimulatedVerifySession(SimulatedSession):
    """A session as the scheduler sees it. `length`: prompt and output; `cached`: of these, tokens with KV."""

    arrival: int
    text: SimulatedText
    length: int
    answer: Callable[[Verification], None]
    draft: Draft = field(default_factory=Draft)
    is_opening: bool = True
    has_work: bool = True
    cached: int = 0
    group: int = 0
    submitted_at: float = 0.0


@dataclass(frozen=True, slots=True)
class _Step:
    batch: Batch[SimulatedVerifySession]
    num_tokens: int
    num_prefill_tokens: int
    begin: float


def walked(text: SimulatedText, position: int, draft: Draft) -> Walk:
    """What the target makes of a draft behind `position` output tokens."""
    return walk(
        draft,
        lambda node, path: text.token(position + len(path)),
        lambda token, count: False,
        text.num_output - position,
    )


class SimulatedSteps:
    """The steps of one verifier process, whatever it puts into them: what they cost, and counts."""

    PAGE_TOKENS = 16

    def __init__(self, timeline: Timeline, plan: VerifierPlan, cores: Cores | None, seed: int) -> None:
        self._timeline = timeline
        self._plan = plan
        self._cores = cores
        self._random = random.Random(seed)
        self._is_busy = False
        self._next_arrival = 0
        self.is_alive = True
        self.busy_s = 0.0
        self.num_steps = 0
        self.num_rows = 0
        self.num_verified = 0
        """Requests that took part in steps, summed over the steps."""

    def _limits(self, groups: int = 1) -> Limits:
        """Limits of one scheduler of so many."""
        plan = self._plan
        return Limits(
            -(-plan.max_num_seqs // groups),
            plan.batches.max_num_batched_tokens,
            plan.batches.prefill_chunk_tokens,
            plan.kv_tokens // self.PAGE_TOKENS // groups,
            self.PAGE_TOKENS,
        )

    def _begin(self, batch: Batch[Any]) -> tuple[float, int, int]:
        """Begin a step; returns its seconds, rows that are verified, and tokens of prompts."""
        rows = requests = prefill = context = 0
        for item in batch.items:
            if item.completes and item.num_prefix_tokens == 1:
                rows += item.num_tokens
                requests += 1
                context += item.session.length
            else:
                prefill += item.num_tokens
        seconds = self._plan.cost.seconds(rows, requests, prefill, context)
        if self._plan.noise:
            seconds *= self._random.uniform(1 - self._plan.noise, 1 + self._plan.noise)
        self.num_steps += 1
        self.num_rows += batch.num_tokens
        self.num_verified += len(batch.items)
        self._is_busy = True
        return seconds, rows, prefill

    def _work(self, seconds: float, done: Action) -> None:
        if self._cores is None:
            self._timeline.after(seconds, done)
        else:
            self._cores.run(seconds, self._plan.threads, done)


class Verifier(SimulatedSteps):
    """One verifier process whose sessions wait for rounds."""

    def __init__(self, timeline: Timeline, plan: VerifierPlan, cores: Cores | None, seed: int = 0) -> None:
        super().__init__(timeline, plan, cores, seed)
        self.verifier_id = f"verifier-{seed}"
        groups = 2 if plan.batching == "dual" else 1
        self._schedulers = [Scheduler[SimulatedVerifySession](self._limits(groups)) for _ in range(groups)]
        self._members: list[dict[int, SimulatedVerifySession]] = [{} for _ in range(groups)]
        self._batching_delay = BatchingDelay(plan.batching_delay_share if plan.batching == "gathered" else 0.0)
        self._wakes_at = 0.0
        self._turn = 0

    def open(self, text: SimulatedText, length: int, answer: Callable[[Verification], None]) -> SimulatedVerifySession:
        """A session whose prefix is `length` tokens; `answer` gets each verification, the opening's first."""
        session = SimulatedVerifySession(self._next_arrival, text, length, answer, cached=text.num_cached_tokens)
        self._next_arrival += 1
        session.group = min(range(len(self._members)), key=lambda group: len(self._members[group]))
        self._members[session.group][session.arrival] = session
        self._submit(session)
        return session

    def verify(self, session: SimulatedVerifySession, draft: Draft) -> None:
        if self.is_alive:
            session.draft, session.has_work = draft, True
            self._batching_delay.came(session.arrival, self._now_ns)
            self._submit(session)

    def close(self, session: SimulatedVerifySession) -> None:
        self._end(session)
        self._step()

    def _end(self, session: SimulatedVerifySession) -> None:
        self._members[session.group].pop(session.arrival, None)
        self._schedulers[session.group].remove(session)
        self._batching_delay.ended(session.arrival)

    @property
    def _now_ns(self) -> int:
        return round(self._timeline.now * 1e9)

    def die(self) -> list[SimulatedVerifySession]:
        """Lose the verifier and whatever it held."""
        self.is_alive = False
        lost = [session for members in self._members for session in members.values()]
        self._members = [{} for _ in self._members]
        return lost

    def _submit(self, session: SimulatedVerifySession) -> None:
        session.submitted_at = self._timeline.now
        self._schedulers[session.group].submit(session)
        self._step()

    def _step(self) -> None:
        if self._is_busy or not self.is_alive or self._delays():
            return
        for _ in self._schedulers:
            group = self._turn
            self._turn = (self._turn + 1) % len(self._schedulers)
            if not self._is_due(group):
                continue
            scheduler = self._schedulers[group]
            for session in scheduler.rearrange().preempted:
                session.cached = 0
            batch = scheduler.plan()
            if batch.items:
                self._run(batch)
                return

    def _is_due(self, group: int) -> bool:
        members = self._members[group].values()
        if not members:
            return False
        if self._plan.batching in ("gathered", "ready"):
            return True
        # Prefill goes on meanwhile: the step does not wait for sessions that cannot be verified yet.
        return all(session.has_work for session in members) or any(
            session.has_work and session.num_missing > 1 for session in members
        )

    def _delays(self) -> bool:
        """Whether the next step still waits; then it is looked at again when the wait is over."""
        left = self._batching_delay.seconds_left(self._now_ns)
        if not left or not any(scheduler.has_work for scheduler in self._schedulers):
            return False
        ends_at = self._timeline.now + left
        if not self._timeline.now < self._wakes_at <= ends_at:
            self._wakes_at = ends_at
            self._timeline.after(left, self._step)
        return True

    def _run(self, batch: Batch[SimulatedVerifySession]) -> None:
        seconds, _, prefill = self._begin(batch)
        # Now: a session's draft is gone once it is answered.
        step = _Step(batch, batch.num_tokens, prefill, self._timeline.now)
        self._work(seconds, lambda: self._finish(step))

    def _finish(self, step: _Step) -> None:
        self._is_busy = False
        if not self.is_alive:
            return
        self.busy_s += self._timeline.now - step.begin
        self._batching_delay.stepped(round((self._timeline.now - step.begin) * 1e9))
        for item in step.batch.items:
            session = item.session
            if session.arrival not in self._members[session.group]:
                continue
            session.cached += item.num_prefix_tokens
            if item.completes:
                verification = self._verification(session, step)
                session.answer(verification)
                if verification.finish_reason is None:
                    self._batching_delay.answered(session.arrival, self._now_ns)
                else:
                    self._end(session)
        self._step()

    def _verification(self, session: SimulatedVerifySession, step: _Step) -> Verification:
        text = session.text
        found = walked(text, session.length - len(text.prompt_token_ids), session.draft)
        verification = Verification(
            session.length,
            found.num_accepted,
            found.output_token_ids,
            found.finish,
            queue_us=round(max(step.begin - session.submitted_at, 0.0) * 1e6),
            forward_us=round((self._timeline.now - step.begin) * 1e6),
            batch_requests=len(step.batch.items),
            batch_tokens=step.num_tokens,
            batch_prefill_tokens=step.num_prefill_tokens,
        )
        session.cached += found.num_accepted
        session.length += len(found.output_token_ids)
        session.draft, session.has_work, session.is_opening = Draft(), False, False
        return verification
