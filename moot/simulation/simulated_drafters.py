"""A simulated pool of drafters: each replica drafts for all waiting asks in one batch, and ahead while it is idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from moot.core.types import Proposal
from moot.simulation.events import Action, Cores, Timeline
from moot.simulation.machine_costs import DraftTime
from moot.simulation.simulated_texts import SimulatedText

_NOTHING = Proposal(())


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The plan of one drafter: `replicas` of it. `ahead_tokens`: how far past its proposal an idle replica goes on.
    `overhead_s`: CPU of one ask beside drafting. `family`: drafters that are alike for the vote (empty: its own).
    `noise`: each batch takes up to so much more or less, as a part of its time."""

    drafter_id: str
    replicas: int = 1
    time: DraftTime = field(default_factory=DraftTime)
    ahead_tokens: int = 0
    max_batch: int = 64
    overhead_s: float = 0.0
    family: str = ""
    noise: float = 0.0


@dataclass(eq=False, slots=True)
class SimulatedDraftSession:
    """A session of one request on a replica: the path drafted so far from `position`, and how long it may become."""

    text: SimulatedText
    replica: Replica
    position: int = 0
    path: Proposal = _NOTHING
    goal: int = 0
    length: int = 0
    answer: Callable[[Proposal | None], None] | None = None


class Replica:
    """One drafter process."""

    def __init__(self, timeline: Timeline, plan: PoolPlan, number: int, cores: Cores | None) -> None:
        self._timeline = timeline
        self._plan = plan
        self._number = number
        self._cores = cores
        self._waiting: dict[int, SimulatedDraftSession] = {}
        self._is_busy = False
        self._idle_since = 0.0
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
        wait = self._credit()
        self.num_asks += 1
        _follow(session, position)
        session.length, session.answer = length, answer
        if len(session.path.token_ids) >= length:
            self.num_from_ahead += 1
            session.goal = length + self._plan.ahead_tokens
            self._waiting.pop(id(session), None)
            self._answer(session)
            return
        self._waiting[id(session)] = session
        if not self._is_busy:
            # The step that it is at, drafting ahead, is finished first.
            self._is_busy = True
            self._timeline.after(wait, self._begin)

    def close(self, session: SimulatedDraftSession) -> None:
        self._credit()
        self.sessions.pop(id(session), None)
        self._waiting.pop(id(session), None)

    def die(self) -> list[SimulatedDraftSession]:
        """Lose the replica and whatever it held."""
        self.is_alive = False
        lost = list(self.sessions.values())
        self.sessions.clear()
        self._waiting.clear()
        return lost

    def _begin(self) -> None:
        batch: list[SimulatedDraftSession] = []
        while self._waiting and len(batch) < self._plan.max_batch:
            batch.append(self._waiting.pop(next(iter(self._waiting))))
        if not batch or not self.is_alive:
            self._is_busy = False
            self._idle_since = self._timeline.now
            return
        missing = max(session.length - len(session.path.token_ids) for session in batch)
        seconds = self._plan.time.seconds(missing, len(batch)) + self._plan.overhead_s * len(batch)
        if self._plan.noise:
            seconds *= self._random.uniform(1 - self._plan.noise, 1 + self._plan.noise)
        self.busy_s += seconds
        self._work(seconds, lambda: self._finish(batch))

    def _work(self, seconds: float, done: Action) -> None:
        if self._cores is None:
            self._timeline.after(seconds, done)
        else:
            self._cores.run(seconds, 1, done)

    def _finish(self, batch: list[SimulatedDraftSession]) -> None:
        if not self.is_alive:
            return
        for session in batch:
            if id(session) not in self.sessions or id(session) in self._waiting:
                continue
            session.path = session.text.propose(self._number, session.position, session.length, session.path)
            session.goal = session.length + self._plan.ahead_tokens
            self._answer(session)
        self._begin()

    def _answer(self, session: SimulatedDraftSession) -> None:
        answer, session.answer = session.answer, None
        if answer is not None:
            path = session.path.part(0, session.length)
            answer(Proposal(path.token_ids, path.confidences, self._plan.drafter_id))

    def _credit(self) -> float:
        """Give the paths what the replica has drafted ahead since it fell idle; returns how long its present step still
        takes. Worked out on demand, so that idle drafters cost no events."""
        timeline, ahead = self._timeline, self._plan.ahead_tokens
        if self._is_busy or not ahead:
            return 0.0
        left = timeline.now - self._idle_since
        if left < 0:
            return -left
        self._idle_since = timeline.now
        while left > 0:
            batch = [one for one in self.sessions.values() if len(one.path.token_ids) < one.goal][
                : self._plan.max_batch
            ]
            if not batch:
                break
            left -= self._plan.time.seconds(1, len(batch))
            for session in batch:
                session.path = session.text.propose(
                    self._number, session.position, len(session.path.token_ids) + 1, session.path
                )
            if left < 0:
                # The step under way: its tokens are there once it has ended, and the ask waits for that.
                self._idle_since -= left
                return -left
        return 0.0


class SimulatedDrafterPool:
    """The replicas of one drafter."""

    def __init__(self, timeline: Timeline, plan: PoolPlan, number: int, cores: Cores | None) -> None:
        self.plan = plan
        self.replicas = [Replica(timeline, plan, number, cores) for _ in range(plan.replicas)]

    def open(self, text: SimulatedText) -> SimulatedDraftSession | None:
        """A session at the replica with the fewest; None: no replica is left."""
        alive = [replica for replica in self.replicas if replica.is_alive]
        if not alive:
            return None
        replica = min(alive, key=lambda one: len(one.sessions))
        session = SimulatedDraftSession(text, replica)
        replica.sessions[id(session)] = session
        return session


def _follow(session: SimulatedDraftSession, position: int) -> None:
    """Tokens `session.position` to `position` were committed: keep the path where it runs through them."""
    ids = session.path.token_ids
    added = position - session.position
    held = added <= len(ids) and all(ids[i] == session.text.token(session.position + i) for i in range(added))
    session.path = session.path.part(added) if held else _NOTHING
    session.goal = 0
    session.position = position
