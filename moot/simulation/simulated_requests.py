"""A simulated request: the rounds of the real router, in simulated time and with the project's own policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from moot.core.generation import Generation
from moot.core.speculation.policy import PoolPolicy, RequestPolicy, RoundPlan
from moot.core.types import Draft, Proposal, SamplingParams, Verification
from moot.core.voting.voting import VoteResult
from moot.simulation.events import Server, Timeline
from moot.simulation.router_plan import Counts, RouterPlan
from moot.simulation.simulated_drafters import SimulatedDrafterPool, SimulatedDraftSession
from moot.simulation.simulated_texts import SimulatedText
from moot.simulation.simulated_verifiers import SimulatedVerifySession, Verifier

CONTEXT_LIMIT = 1 << 20


class Request:
    """One request from its opening to its end; then `ended` is called."""

    def __init__(
        self,
        timeline: Timeline,
        plan: RouterPlan,
        router: Server,
        policy: PoolPolicy,
        pools: list[SimulatedDrafterPool],
        text: SimulatedText,
        counts: Counts,
        ended: Callable[[], None],
        beside: Sequence[Server] = (),
    ) -> None:
        self._beside = beside
        self._timeline = timeline
        self._plan = plan
        self._router = router
        self._pools = pools
        self._text = text
        self._counts = counts
        self._ended = ended
        self._policy: RequestPolicy = policy.open([pool.plan.drafter_id for pool in pools], plan.num_speculative_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=text.num_output)
        self._generation = Generation(text.prompt_token_ids, params)
        self._verifier: Verifier | None = None
        self._session: SimulatedVerifySession | None = None
        self._drafting: list[SimulatedDraftSession | None] = []
        self._box: _Box | None = None
        self._round_at = 0.0
        self._last_length = -1

    def start(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._drafting = [pool.open(self._text) for pool in self._pools]
        self._router.work(self._plan.open_s, lambda: self._send(self._open))

    def move(self, verifier: Verifier) -> None:
        """Move to another verifier, as this one is lost: open again there, with all that is committed."""
        self._counts.moves += 1
        self._verifier, self._session, self._box = verifier, None, None
        self._timeline.after(self._plan.detect_s, self._open)

    def lose_drafters(self, lost: set[SimulatedDraftSession]) -> None:
        """These sessions are lost: the round goes on without them, the next ask finds others."""
        for number, session in enumerate(self._drafting):
            if session in lost:
                self._lose_drafter(number)

    def _lose_drafter(self, number: int) -> None:
        self._drafting[number] = None
        if self._box is not None:
            self._box.lose(number)
        self._timeline.after(self._plan.detect_s, partial(self._find_drafter, number))

    def _find_drafter(self, number: int) -> None:
        if self._drafting[number] is None and not self._generation.is_finished:
            session = self._drafting[number] = self._pools[number].open(self._text)
            if session is not None:
                session.position = len(self._generation.output_token_ids)

    def _send(self, action: Callable[[], None]) -> None:
        self._timeline.after(self._plan.network_s, action)

    def _open(self) -> None:
        if self._verifier is None:
            return
        verifier = self._verifier
        length = self._generation.base_length
        self._session = verifier.open(
            self._text, length, lambda found: self._send(partial(self._arrive, verifier, found))
        )

    def _arrive(self, verifier: Verifier, found: Verification) -> None:
        """A verification is at the router."""
        if verifier is not self._verifier:
            return
        self._router.work(self._plan.round_s / 2, partial(self._take, verifier, found))

    def _take(self, verifier: Verifier, found: Verification) -> None:
        if verifier is not self._verifier:
            return
        learn = _nothing
        if self._box is None:
            self._generation.open(found)
            self._counts.tokens += 1
        else:
            learn = self._advance(self._box, found)
        for server, seconds in zip(self._beside, self._plan.beside_s, strict=True):
            server.work(seconds, _nothing)
        if self._generation.is_finished:
            learn()
            self._end()
        else:
            # Drafters work while the router learns; so K knows the rounds before this one.
            self._ask()
            learn()
        self._work(self._plan.behind_s, _nothing)

    def _advance(self, box: _Box, found: Verification) -> Callable[[], None]:
        """Commit a round; returns what learns from it."""
        result = box.result
        assert result is not None
        found = self._generation.advance(found, result.draft, box.proposals, result.winner_ids)
        counts = self._counts
        counts.tokens += len(found.output_token_ids)
        counts.rounds += 1
        counts.drafted += len(result.draft)
        counts.accepted += found.num_accepted
        counts.round_s += self._timeline.now - self._round_at
        counts.draft_s += box.draft_s if box.plan.num_speculative_tokens else 0.0
        round_s = self._timeline.now - box.asked_at
        return lambda: self._policy.learn(box.plan, result, found, box.draft_s, round_s, box.answers)

    def _ask(self) -> None:
        plan = self._policy.plan(self._generation, CONTEXT_LIMIT)
        length = plan.num_speculative_tokens
        self._round_at = self._timeline.now
        self._counts.lengths[length] = self._counts.lengths.get(length, 0) + 1
        self._counts.switches += self._last_length >= 0 and length != self._last_length
        self._last_length = length
        box = self._box = _Box(self, plan, self._timeline.now)
        asked = self._chosen() if length else []
        box.open = {number for number, _ in asked}
        box.answers = {self._pools[number].plan.drafter_id: None for number, _ in asked}
        position = len(self._generation.output_token_ids)

        def put() -> None:
            for number, session in asked:
                self._send(partial(session.replica.ask, session, position, length, partial(box.answered, number)))

        if not asked:
            box.close()
        else:
            self._work(self._plan.ask_s / 2, put)
            self._timeline.after(self._plan.tries.soft_deadline_s, box.soft_deadline)
            self._timeline.after(self._plan.tries.hard_deadline_s, box.close)

    def _chosen(self) -> list[tuple[int, SimulatedDraftSession]]:
        """The sessions of drafters that a round asks, each with the number of its pool."""
        found = {self._pools[i].plan.drafter_id: (i, one) for i, one in enumerate(self._drafting) if one is not None}
        return [found[drafter_id] for drafter_id in self._policy.choose(list(found))]

    def _work(self, seconds: float, action: Callable[[], None]) -> None:
        """Use CPU of the router; without a cost nothing waits in its queue."""
        if seconds:
            self._router.work(seconds, action)
        else:
            action()

    @property
    def now(self) -> float:
        return self._timeline.now

    @property
    def plan(self) -> RouterPlan:
        return self._plan

    def deliver(self, action: Callable[[], None]) -> None:
        """An answer on its way back to the router."""
        self._send(action)

    def collected(self, box: _Box) -> None:
        if box is self._box:
            self._counts.late += len(box.open)
            asking_s = self._plan.ask_s / 2 if box.plan.num_speculative_tokens else 0.0
            self._work(asking_s, partial(self._close, box))

    def _close(self, box: _Box) -> None:
        box.draft_s = self._timeline.now - box.asked_at
        self._router.work(self._plan.round_s / 2, partial(self._vote, box))

    def _vote(self, box: _Box) -> None:
        if box is not self._box:
            return
        verifier_id = "" if self._verifier is None else self._verifier.verifier_id
        box.result = self._policy.vote(box.plan, box.proposals, verifier_id)
        self._send(partial(self._verify, box, box.result.draft))

    def _verify(self, box: _Box, draft: Draft) -> None:
        if box is self._box and self._verifier is not None and self._session is not None:
            self._verifier.verify(self._session, draft)

    def _end(self) -> None:
        for session in self._drafting:
            if session is not None:
                session.replica.close(session)
        if self._verifier is not None and self._session is not None:
            self._verifier.close(self._session)
        self._policy.close()
        self._counts.finished += 1
        self._ended()


class _Box:
    """The proposals of one round: closed when all have answered, when a quorum has by the soft deadline, or at the hard
    one."""

    __slots__ = ("_is_closed", "_request", "answers", "asked_at", "draft_s", "open", "plan", "proposals", "result")

    def __init__(self, request: Request, plan: RoundPlan, asked_at: float) -> None:
        self._request = request
        self._is_closed = False
        self.plan = plan
        self.asked_at = asked_at
        self.draft_s = 0.0
        self.open: set[int] = set()
        self.answers: dict[str, float | None] = {}
        """Per drafter that was asked the seconds until its answer was there."""
        self.proposals: list[Proposal] = []
        self.result: VoteResult | None = None

    def answered(self, number: int, proposal: Proposal | None) -> None:
        """A drafter has answered; the router has the answer a network delay later."""
        self._request.deliver(partial(self._arrive, number, proposal))

    def _arrive(self, number: int, proposal: Proposal | None) -> None:
        if self._is_closed or number not in self.open:
            return
        if proposal is not None:
            self.answers[proposal.drafter_id] = self._request.now - self.asked_at
            if proposal.token_ids:
                self.proposals.append(proposal)
        self.lose(number)

    def lose(self, number: int) -> None:
        self.open.discard(number)
        if not self.open:
            self.close()

    def soft_deadline(self) -> None:
        if self.plan.num_speculative_tokens and len(self.proposals) >= self._request.plan.tries.quorum * (
            len(self.proposals) + len(self.open)
        ):
            self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._request.collected(self)


def _nothing() -> None:
    """Do nothing: nothing waits for the action."""
