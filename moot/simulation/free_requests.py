"""A simulated request of a verifier that never waits: the router's part, with the project's own drafting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from moot.core.speculation.policy import PoolPolicy
from moot.core.speculation.request_drafts import RequestDrafts
from moot.core.stepping.held_draft import HeldDraft
from moot.core.types import Proposal
from moot.core.voting.vote_policy import VotePolicy
from moot.simulation.events import Server, Timeline
from moot.simulation.free_verifiers import FreeSession, FreeVerifier, StepAnswer
from moot.simulation.router_plan import Counts, RouterPlan
from moot.simulation.simulated_drafters import SimulatedDrafterPool, SimulatedDraftSession
from moot.simulation.simulated_texts import SimulatedText


class FreeRequest:
    """One request from its opening to its end; then `ended` is called."""

    def __init__(
        self,
        timeline: Timeline,
        plan: RouterPlan,
        router: Server,
        policy: PoolPolicy,
        vote_policy: Callable[[], VotePolicy],
        pools: Sequence[SimulatedDrafterPool],
        text: SimulatedText,
        counts: Counts,
        ended: Callable[[], None],
    ) -> None:
        self._timeline = timeline
        self._plan = plan
        self._router = router
        self._vote_policy = vote_policy
        self._pools = {pool.plan.drafter_id: pool for pool in pools if pool.plan.place == "pool"}
        self._text = text
        self._counts = counts
        self._ended = ended
        self._output: list[int] = []
        self._drafts = RequestDrafts(
            policy, list(self._pools), len(text.prompt_token_ids), self._output, plan.num_speculative_tokens
        )
        self._sessions: dict[str, SimulatedDraftSession | None] = {}
        self._verifier: FreeVerifier | None = None
        self._session: FreeSession | None = None
        self._inbox: list[StepAnswer] = []
        self._proposed: dict[str, tuple[int, Proposal]] = {}
        self._is_behind = False
        self._granted = 0
        self._is_over = False

    def start(self, verifier: FreeVerifier) -> None:
        self._verifier = verifier
        for drafter_id in self._pools:
            self._find_drafter(drafter_id)
        self._router.work(self._plan.open_s, lambda: self._send(self._open))

    def move(self, verifier: FreeVerifier) -> None:
        """Move to another verifier, as this one is lost: open again there, with all that is committed."""
        self._counts.moves += 1
        self._verifier, self._session = verifier, None
        self._inbox.clear()
        self._timeline.after(self._plan.detect_s, self._open)

    def lose_drafters(self, lost: set[SimulatedDraftSession]) -> None:
        """These sessions are lost: their drafters are looked for anew."""
        for drafter_id, session in self._sessions.items():
            if session in lost:
                self._sessions[drafter_id] = None
                self._timeline.after(self._plan.detect_s, partial(self._find_drafter, drafter_id))

    def _find_drafter(self, drafter_id: str) -> None:
        if not self._is_over and self._sessions.get(drafter_id) is None:
            send = partial(self._path, drafter_id)
            self._sessions[drafter_id] = self._pools[drafter_id].open(self._text, send)
            self._drafts.lost(drafter_id)

    def _send(self, action: Callable[[], None]) -> None:
        self._timeline.after(self._plan.network_s, action)

    def _open(self) -> None:
        verifier = self._verifier
        if verifier is None or self._is_over:
            return
        self._granted = self._drafts.length
        answer = partial(self._arrive, verifier)
        self._session = verifier.open(self._text, self._granted, self._plan.credit, self._vote_policy, answer)

    def _arrive(self, verifier: FreeVerifier, answer: StepAnswer) -> None:
        """What a step committed is at the router; all that waits there is taken together."""
        if verifier is self._verifier and not self._is_over:
            self._inbox.append(answer)
            if len(self._inbox) == 1:
                self._router.work(self._plan.answer_s, self._take)

    def _take(self) -> None:
        inbox, self._inbox = self._inbox, []
        if self._is_over or not inbox:
            return
        counts, drafts = self._counts, self._drafts
        for answer in inbox:
            counts.tokens += len(answer.token_ids)
            if self._output:
                counts.rounds += 1
                counts.lengths[answer.num_rows] = counts.lengths.get(answer.num_rows, 0) + 1
            counts.drafted += answer.num_rows
            counts.accepted += answer.num_accepted
            self._output.extend(answer.token_ids)
            drafts.committed(answer.token_ids, answer.num_accepted, answer.price, answer.local)
        if not self._is_behind:
            self._is_behind = True
            self._router.work_later(self._plan.later_s, self._caught_up)
        if inbox[-1].finish_reason is not None:
            self._end()
            return
        if drafts.length - self._granted >= max(self._plan.credit // 2, 1):
            self._granted = drafts.length
            self._send(partial(self._grant, self._session, self._granted))
        self._ask()

    def _caught_up(self) -> None:
        self._is_behind = False

    def _grant(self, session: FreeSession | None, length: int) -> None:
        if self._verifier is not None and session is not None and session is self._session:
            self._verifier.grant(session, length)

    def _ask(self) -> None:
        length = len(self._output)
        for drafter_id in self._drafts.questions():
            session = self._sessions.get(drafter_id)
            if session is None:
                self._drafts.lost(drafter_id)
            else:
                tell = partial(session.replica.tell, session, length, self._drafts.ahead)
                self._router.work(self._plan.tell_s, partial(self._send, tell))

    def _path(self, drafter_id: str, position: int, path: Proposal) -> None:
        """A drafter has sent a path; the router has it a network delay later."""
        self._send(partial(self._proposal, drafter_id, position, path))

    def _proposal(self, drafter_id: str, position: int, path: Proposal) -> None:
        if self._is_over:
            return
        is_first = drafter_id not in self._proposed
        self._proposed[drafter_id] = position, path
        if is_first:
            self._router.work(self._plan.vote_s, partial(self._vote, drafter_id))

    def _vote(self, drafter_id: str) -> None:
        position, path = self._proposed.pop(drafter_id)
        if self._is_over:
            return
        if self._drafts.proposed(drafter_id, len(self._text.prompt_token_ids) + position, (path,)):
            draft = self._drafts.draft()
            if draft is not None:
                self._send(partial(self._offer, self._session, draft))
        else:
            self._counts.late += 1
        self._ask()

    def _offer(self, session: FreeSession | None, draft: HeldDraft) -> None:
        if self._verifier is not None and session is not None and session is self._session:
            self._verifier.offer(session, draft)

    def _end(self) -> None:
        self._is_over = True
        for session in self._sessions.values():
            if session is not None:
                session.replica.close(session)
        self._drafts.close()
        self._counts.finished += 1
        self._ended()
