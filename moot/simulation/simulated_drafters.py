"""A simulated pool of drafters: each replica drafts a token at a time for all requests that want one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moot.core.options import option
from moot.core.types import Proposal
from moot.simulation.events import Action, Cores, Timeline
from moot.simulation.machine_costs import DraftTime
from moot.simulation.simulated_texts import SimulatedText

_NOTHING = Proposal(())
PLACES = ("pool", "verifier", "attached")
"""Where drafters run: in processes of their own, in the verifier's without a model, or on the verifier's own model."""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The plan of one drafter: `replicas` of it. `ahead_tokens`: how far past its proposal an idle replica goes on.
    `overhead_s`: CPU of one ask beside drafting. `family`: drafters that are alike for the vote (empty: its own).
    `noise`: each step takes up to so much more or less, as a part of its time. `chunk`: a drafter that runs on its own
    sends a path each time that it has grown by so many tokens."""

    drafter_id: str
    replicas: int = 1
    time: DraftTime = field(default_factory=DraftTime)
    ahead_tokens: int = 0
    max_batch: int = 64
    overhead_s: float = 0.0
    family: str = ""
    noise: float = 0.0
    place: str = option(
        PLACES[0],
        help="where the drafters run: in processes of their own, in the verifier's, or attached to its model",
        choices=PLACES,
    )
    chunk: int = 2


def chunk_of(step: float, token: float) -> int:
    """Tokens that a drafter which runs on its own sends at once: what it drafts in a third of a step. In one unit."""
    return max(2, int(step / 3 / token)) if token else 2


@dataclass(eq=False, slots=True)
class SimulatedDraftSession:
    """A session of one request on a replica: the path drafted so far from `position`, and how long it may become.

    It either waits for an `answer` of `length` tokens, or sends each `chunk` through `send`, with its position.
    """

    text: SimulatedText
    replica: Replica
    send: Callable[[int, Proposal], None] | None = None
    position: int = 0
    path: Proposal = _NOTHING
    goal: int = 0
    length: int = 0
    num_sent: int = 0
    num_left: int = 0
    """How often a path was left."""
    is_new: bool = False
    """It was asked or told since the replica's last step."""
    answer: Callable[[Proposal | None], None] | None = None

    def follow(self, position: int) -> None:
        """Tokens up to `position` were committed: keep the path where it runs through them."""
        ids = self.path.token_ids
        added = position - self.position
        held = added <= len(ids) and all(ids[i] == self.text.token(self.position + i) for i in range(added))
        self.path = self.path.part(added) if held else _NOTHING
        self.num_sent = max(self.num_sent - added, 0) if held else 0
        self.num_left += not held
        self.goal = 0
        self.position = position
        self.is_new = True


class Replica:
    """One drafter process."""

    def __init__(self, timeline: Timeline, plan: PoolPlan, number: int, cores: Cores | None) -> None:
        self._timeline = timeline
        self._plan = plan
        self._number = number
        self._cores = cores
        # Sessions that want tokens, those that are waited for first.
        self._asking: dict[int, SimulatedDraftSession] = {}
        self._drafting: dict[int, SimulatedDraftSession] = {}
        self._is_busy = False
        self._random = random.Random(number)
        self.sessions: dict[int, SimulatedDraftSession] = {}
        self.is_alive = True
        self.busy_s = 0.0
        self.num_asks = 0
        self.num_from_ahead = 0

    def ask(
        self, session: SimulatedDraftSession, position: int, length: int, answer: Callable[[Proposal | None], None]
    ) -> None:
        """Propose `length` tokens after `position`; a newer ask of a session takes the place of an older one."""
        if not self.is_alive:
            return
        self.num_asks += 1
        session.follow(position)
        session.length, session.answer, session.goal = length, answer, length + self._plan.ahead_tokens
        self._asking.pop(id(session), None)
        if len(session.path.token_ids) >= length:
            self.num_from_ahead += 1
            self._answer(session)
        else:
            self._asking[id(session)] = session
        self._want(session)

    def tell(self, session: SimulatedDraftSession, position: int, ahead: int) -> None:
        """Tokens up to `position` are committed: draft up to `ahead` tokens past them."""
        if not self.is_alive:
            return
        self.num_asks += 1
        session.follow(position)
        session.goal = ahead
        self._want(session)

    def close(self, session: SimulatedDraftSession) -> None:
        for sessions in (self.sessions, self._asking, self._drafting):
            sessions.pop(id(session), None)

    def die(self) -> list[SimulatedDraftSession]:
        """Lose the replica and whatever it held."""
        self.is_alive = False
        lost = list(self.sessions.values())
        for sessions in (self.sessions, self._asking, self._drafting):
            sessions.clear()
        return lost

    def _want(self, session: SimulatedDraftSession) -> None:
        if len(session.path.token_ids) < session.goal:
            self._drafting[id(session)] = session
        if not self._is_busy:
            self._step()

    def _step(self) -> None:
        """One token for each session that wants one."""
        batch = list(self._asking.values())[: self._plan.max_batch]
        chosen = {id(session) for session in batch}
        batch += [one for key, one in self._drafting.items() if key not in chosen][: self._plan.max_batch - len(batch)]
        self._is_busy = bool(batch) and self.is_alive
        if not self._is_busy:
            return
        plan, num_new = self._plan, sum(session.is_new for session in batch)
        seconds = plan.time.seconds(1, len(batch)) - (0 if num_new else plan.time.start_s) + plan.overhead_s * num_new
        if plan.noise:
            seconds *= self._random.uniform(1 - plan.noise, 1 + plan.noise)
        self.busy_s += seconds
        for session in batch:
            session.is_new = False
        drafted = [(session, session.num_left) for session in batch]
        self._work(seconds, lambda: self._finish(drafted))

    def _work(self, seconds: float, done: Action) -> None:
        if self._cores is None:
            self._timeline.after(seconds, done)
        else:
            self._cores.run(seconds, 1, done)

    def _finish(self, drafted: list[tuple[SimulatedDraftSession, int]]) -> None:
        if not self.is_alive:
            return
        for session, num_left in drafted:
            if id(session) not in self.sessions:
                continue
            # Where what was committed meanwhile has left the path, the step was for nothing.
            if num_left == session.num_left:
                length = len(session.path.token_ids) + 1
                session.path = session.text.propose(self._number, session.position, length, session.path)
            self._hand_out(session)
        self._step()

    def _hand_out(self, session: SimulatedDraftSession) -> None:
        length, key = len(session.path.token_ids), id(session)
        if session.answer is not None and length >= session.length:
            self._asking.pop(key, None)
            self._answer(session)
        if length >= session.goal:
            self._drafting.pop(key, None)
        unsent = length - session.num_sent
        if session.send is not None and unsent and (unsent >= self._plan.chunk or length >= session.goal):
            session.num_sent = length
            path = session.path
            session.send(session.position, Proposal(path.token_ids, path.confidences, self._plan.drafter_id))

    def _answer(self, session: SimulatedDraftSession) -> None:
        answer, session.answer = session.answer, None
        if answer is not None:
            path = session.path.part(0, session.length)
            answer(Proposal(path.token_ids, path.confidences, self._plan.drafter_id))


class SimulatedDrafterPool:
    """The replicas of one drafter."""

    def __init__(self, timeline: Timeline, plan: PoolPlan, number: int, cores: Cores | None) -> None:
        self.plan = plan
        self.replicas = [Replica(timeline, plan, number, cores) for _ in range(plan.replicas)]

    def open(
        self, text: SimulatedText, send: Callable[[int, Proposal], None] | None = None
    ) -> SimulatedDraftSession | None:
        """A session at the replica with the fewest; None: no replica is left. `send`: where it runs on its own, what
        takes its paths."""
        alive = [replica for replica in self.replicas if replica.is_alive]
        if not alive:
            return None
        replica = min(alive, key=lambda one: len(one.sessions))
        session = SimulatedDraftSession(text, replica, send)
        replica.sessions[id(session)] = session
        return session
