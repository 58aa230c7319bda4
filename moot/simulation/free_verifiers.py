"""A simulated verifier that never waits: every session takes part in every step, with what is worth its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moot.core.scheduler import Batch, Scheduler
from moot.core.stepping.draft_wait import DraftWait
from moot.core.stepping.held_draft import HeldDraft
from moot.core.stepping.step_price import StepPrice
from moot.core.stepping.step_times import StepTimes
from moot.core.types import ROOT, Draft, FinishReason, Proposal
from moot.core.voting.vote_policy import VotePolicy
from moot.simulation.events import Cores, Timeline
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_texts import SimulatedText
from moot.simulation.simulated_verifiers import SimulatedSession, SimulatedSteps, VerifierPlan, walked

_MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256, 512, 1024)
"""Sizes of the steps that a verifier measures at its start."""
_NOTHING = Proposal(())


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """What one step committed for one session. `num_rows`: verified of its draft. `price`: of a row in that step.
    `local`: proposals of drafters at the verifier that took part in the vote."""

    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None
    num_rows: int
    price: float
    local: tuple[Proposal, ...]


@dataclass(eq=False, slots=True)
class FreeSession(SimulatedSession):
    """A session as the scheduler sees it. `length`: prompt and output; `cached`: of these, tokens with KV; `heard`:
    length up to which the router has heard."""

    arrival: int
    text: SimulatedText
    length: int
    heard: int
    credit: int
    policy: Callable[[], VotePolicy]
    answer: Callable[[StepAnswer], None]
    cached: int = 0
    draft: Draft = field(default_factory=Draft)
    held: HeldDraft | None = None
    local: tuple[Proposal, ...] = ()
    attached: tuple[Proposal, ...] = ()

    @property
    def has_work(self) -> bool:
        return self.length - self.heard < self.credit

    @property
    def position(self) -> int:
        """Output tokens."""
        return self.length - len(self.text.prompt_token_ids)


class FreeVerifier(SimulatedSteps):
    """One verifier process. `pools`: all drafters of the installation; it runs those whose place is here."""

    def __init__(
        self,
        timeline: Timeline,
        plan: VerifierPlan,
        pools: Sequence[PoolPlan],
        network_s: float,
        cores: Cores | None,
        seed: int = 0,
    ) -> None:
        super().__init__(timeline, plan, cores, seed)
        self._network_s = network_s
        self._local = [(number, pool) for number, pool in enumerate(pools) if pool.place == "verifier"]
        self._attached = [(number, pool) for number, pool in enumerate(pools) if pool.place == "attached"]
        self._scheduler = Scheduler[FreeSession](self._limits())
        self._price = StepPrice(StepTimes({rows: plan.cost.seconds(rows, 1) for rows in _MEASURED_ROWS}))
        self._wait = DraftWait()
        self._ready_at = 0.0
        self._sessions: dict[int, FreeSession] = {}

    def open(
        self,
        text: SimulatedText,
        length: int,
        credit: int,
        policy: Callable[[], VotePolicy],
        answer: Callable[[StepAnswer], None],
    ) -> FreeSession:
        """A session whose prefix is `length` tokens; `answer` gets what each step commits, at the router."""
        cached = text.num_cached_tokens
        session = FreeSession(self._next_arrival, text, length, length, credit, policy, answer, cached)
        self._next_arrival += 1
        self._sessions[session.arrival] = session
        self._scheduler.submit(session)
        self._step()
        return session

    def offer(self, session: FreeSession, draft: HeldDraft) -> None:
        """Hold a draft, if anything of it is left; it is taken up by the next step that is planned."""
        prompt = len(session.text.prompt_token_ids)
        since = [session.text.token(at - prompt) for at in range(draft.base_length, session.length)]
        left, _ = draft.after(since)
        first = sum(
            [chance for parent, chance in zip(draft.draft.parents, draft.chances, strict=True) if parent == ROOT]
        )
        self._wait.came(session.arrival, draft.base_length, first, self._timeline.now)
        if left is not None:
            session.held = left
        self._step()

    def grant(self, session: FreeSession, length: int) -> None:
        """The router has heard of the text up to this length."""
        session.heard = max(session.heard, length)
        self._step()

    def die(self) -> None:
        """Lose the verifier and whatever it held."""
        self.is_alive = False
        self._sessions.clear()

    def _end(self, session: FreeSession) -> None:
        self._sessions.pop(session.arrival, None)
        self._scheduler.remove(session)
        self._wait.ended(session.arrival)

    def _waits(self) -> bool:
        """Whether the next step waits for drafts; then it is looked at again when the wait is over."""
        count = len(self._verifying())
        # Where drafters run here no session is without a draft.
        if not self._plan.waits or self._local or not count:
            return False
        step_s = self._price.times.seconds(count)
        now = self._timeline.now
        left = self._wait.seconds_left(now, self._ready_at, count, self._price.delivered(count), step_s)
        if left > 0:
            self._timeline.after(left, self._step)
        return left > 0

    def _verifying(self) -> list[FreeSession]:
        """The sessions that the next step verifies."""
        return [session for session in self._scheduler.admitted if session.has_work and session.num_missing == 1]

    def _step(self) -> None:
        if self._is_busy or not self.is_alive or self._waits():
            return
        for session in self._scheduler.rearrange().preempted:
            session.cached = 0
        self._take_drafts()
        batch = self._scheduler.plan()
        if batch.items:
            self._run(batch)

    def _take_drafts(self) -> None:
        """Give the sessions of the next step the drafts that are worth their rows."""
        verifying = self._verifying()
        for session in verifying:
            self._draft(session)
        offers = [() if session.held is None else session.held.chances for session in verifying]
        most = self._plan.batches.max_num_batched_tokens - self._plan.batches.prefill_chunk_tokens - len(verifying)
        if verifying:
            for session, count in zip(verifying, self._price.take(offers, len(verifying), most), strict=True):
                session.draft = Draft() if session.held is None else session.held.piece(count)

    def _draft(self, session: FreeSession) -> None:
        """Let the drafters that run here vote together with what has come."""
        session.local = ()
        left = session.text.num_output - session.position - 1
        if session.position == 0 or left <= 0:
            return
        policy = session.policy()
        length = min(policy.num_speculative_tokens, left)
        session.local = session.attached + tuple(
            _named(session.text.propose(number, session.position, length, _NOTHING), pool)
            for number, pool in self._local
        )
        if session.local:
            proposals = () if session.held is None else session.held.proposals
            result = policy.apply([*proposals, *session.local])
            session.held = HeldDraft(session.length, result.draft, result.chances, proposals)

    def _run(self, batch: Batch[FreeSession]) -> None:
        seconds, rows, prefill = self._begin(batch)
        begin = self._timeline.now
        self._work(seconds, lambda: self._finish(batch, begin, 0 if prefill else rows))

    def _finish(self, batch: Batch[FreeSession], begin: float, num_rows: int) -> None:
        if not self.is_alive:
            return
        seconds = self._timeline.now - begin
        self.busy_s += seconds
        drafting: list[FreeSession] = []
        num_tokens = num_sessions = 0
        for item in batch.items:
            session = item.session
            if session.arrival not in self._sessions:
                continue
            session.cached += item.num_prefix_tokens
            if item.completes:
                num_tokens += self._commit(session)
                num_sessions += 1
                drafting.append(session)
        if num_rows and num_sessions:
            self._price.stepped(num_sessions, num_rows, num_tokens, seconds)
        self._draft_attached([session for session in drafting if session.arrival in self._sessions])

    def _commit(self, session: FreeSession) -> int:
        """What the target makes of a session's draft; returns the number of tokens."""
        found = walked(session.text, session.position, session.draft)
        token_ids, num_rows = found.output_token_ids, len(session.draft)
        session.cached += found.num_accepted
        session.length += len(token_ids)
        session.draft = Draft()
        if session.held is not None:
            session.held, _ = session.held.after(token_ids)
        answer = StepAnswer(token_ids, found.num_accepted, found.finish, num_rows, self._price.price, session.local)
        if session.held is None:
            self._wait.answered(session.arrival, session.length, self._timeline.now)
        else:
            self._wait.ended(session.arrival)
        self._timeline.after(self._network_s, lambda: session.answer(answer))
        if found.finish is not None:
            self._end(session)
        return len(token_ids)

    def _draft_attached(self, sessions: Sequence[FreeSession]) -> None:
        """Let the drafters on the verifier's own model draft for what follows, then go on."""
        length = self._attached_length(sessions) if sessions else 0
        for session in sessions:
            session.attached = tuple(
                _named(session.text.propose(number, session.position, length, _NOTHING), pool)
                for number, pool in self._attached
                if length
            )
        seconds = sum(pool.time.seconds(length, len(sessions)) for _, pool in self._attached) if length else 0.0
        if seconds:
            self.busy_s += seconds
            self._work(seconds, self._go_on)
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._is_busy = False
        self._ready_at = self._timeline.now
        self._step()

    def _attached_length(self, sessions: Sequence[FreeSession]) -> int:
        """The length that makes most tokens a second of the whole step, drafting included."""
        if not self._attached:
            return 0
        policy, count = sessions[0].policy(), len(sessions)
        rates = policy.of(self._attached[0][1].drafter_id)
        best, best_rate, chance, expected = 0, 0.0, 1.0, 1.0
        for length in range(policy.num_speculative_tokens + 1):
            if length:
                chance *= rates.rate(_CONFIDENCE, length - 1)
                expected += chance
            drafting = sum(one.time.seconds(length, count) for _, one in self._attached) if length else 0.0
            rate = count * expected / (self._price.times.seconds(count * (1 + length)) + drafting)
            if rate > best_rate:
                best, best_rate = length, rate
        return best


_CONFIDENCE = 128
"""Of all tokens of simulated drafters."""


def _named(proposal: Proposal, pool: PoolPlan) -> Proposal:
    return Proposal(proposal.token_ids, proposal.confidences, pool.drafter_id)
