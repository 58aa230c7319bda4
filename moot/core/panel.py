"""Whom to ask at all: a drafter that brings less than waiting for it costs is left out, and tried again now and then.

The panel keeps a window of rounds: how far each drafter was right and when its answer was there. Each full window is
played again without some of the drafters: what was accepted on their word alone is lost, and so is the time for which
only they were waited for. If the rest would have been faster, the rest is asked from then on. Pure, durations are
arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from moot.core.speculation import Probes

PAYING, ALL = "paying", "all"
PANELS = (PAYING, ALL)
"""Whom rounds ask: those that the panel finds worth it, or every drafter."""
SILENT, SLOW, USELESS = "silent", "slow", "useless"
REASONS = (SILENT, SLOW, USELESS)
"""Why a drafter is left out: it hardly ever answers in time; what it brings does not pay for the wait; it brings
nothing that others do not. A closed set, fit for a label."""

WINDOW: Final = 64
"""Rounds of a window, where requests are verified alone."""
_WINDOW_PER_REQUEST: Final = 8
"""Further rounds for each further request of a step: rounds of one step wait for the same."""
_ASK: Final = 0.002
"""What asking one drafter costs beside waiting for it, as a part of a round: messages, and its own work."""
_BETTER: Final = 1.001
"""How much faster the rest must have been."""
_TRIALS: Final = 8
"""The latest rounds in which a drafter that is left out was tried."""
_FEWEST_TRIALS: Final = 4
_AFTER, _AT_MOST = 8, 1024
_SHARE: Final = 0.005
"""Part of the time that trying may take, of all drafters together that are left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one drafter that was asked in a round. `num_right`: leading tokens of its best proposal that were accepted;
    `seconds`: from asking to its answer; None: it did not come before the vote."""

    num_right: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class PanelRound:
    """A round that drafted. `draft_seconds`: from asking to the vote; `seconds`: from asking to the commit."""

    answers: Mapping[str, Answer]
    num_accepted: int
    num_tokens: int
    draft_seconds: float
    seconds: float

    def without(self, left_out: frozenset[str]) -> tuple[int, float]:
        """Tokens that it would not have brought without these, and seconds that it would not have waited."""
        right, there = 0, 0.0
        for drafter_id, answer in self.answers.items():
            if drafter_id not in left_out:
                right = max(right, answer.num_right)
                there = max(there, self.waited(drafter_id))
        last = max(map(self.waited, self.answers), default=0.0)
        return max(self.num_accepted - right, 0), min(last - there, self.seconds)

    def waited(self, drafter_id: str) -> float:
        """Seconds until this one's answer was there, or the vote went on without."""
        seconds = self.answers[drafter_id].seconds
        return self.draft_seconds if seconds is None else min(seconds, self.draft_seconds)


@dataclass(slots=True)
class _Absence:
    """A drafter that is left out, and how it did when it was tried."""

    reason: str
    probes: Probes
    cost: float
    """Of a round with it, in rounds without."""
    trials: deque[PanelRound] = field(default_factory=lambda: deque(maxlen=_TRIALS))


class Panel:
    """Of one router, for all its requests. The last drafter is never left out: whether drafting pays at all is the
    length policy's to say."""

    def __init__(self) -> None:
        self.exempt: set[str] = set()
        """Drafters that are asked whatever they bring: what they cost shows elsewhere."""
        self.num_changes = 0
        self._rounds: list[PanelRound] = []
        self._absent: dict[str, _Absence] = {}
        self._patience: dict[str, int] = {}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Drafter id to one of REASONS, of those that are asked only to try them."""
        return {drafter_id: absence.reason for drafter_id, absence in self._absent.items()}

    def choose(self, drafter_ids: Sequence[str]) -> Sequence[str]:
        """Whom of a request's drafters a round asks. Call it once for each round that drafts: it counts them, and may
        name one that is left out, to try it. Where all would be left out, all are asked."""
        if not self._absent:
            return drafter_ids
        present = [drafter_id for drafter_id in drafter_ids if drafter_id not in self._absent]
        if not present:
            return drafter_ids
        for drafter_id in drafter_ids:
            absence = self._absent.get(drafter_id)
            if absence is not None and absence.probes.is_due(absence.cost * len(self._absent)):
                return [one for one in drafter_ids if one == drafter_id or one not in self._absent]
        return present

    def is_trial(self, drafter_ids: Iterable[str]) -> bool:
        """Whether a round that asked these tried one that is left out: what it waited for is no usual wait."""
        return bool(self._absent) and not self._absent.keys().isdisjoint(drafter_ids)

    def learn(self, done: PanelRound, num_requests: int = 1) -> bool:
        """`num_requests`: of the verify step. Returns whether the panel has changed."""
        if self.is_trial(done.answers):
            return self._learn_of_trial(done)
        self._rounds.append(done)
        if len(self._rounds) < WINDOW + _WINDOW_PER_REQUEST * (num_requests - 1):
            return False
        left = self._leave_out()
        for drafter_id in {one for done in self._rounds for one in done.answers} - left:
            if drafter_id in self._patience:
                self._patience[drafter_id] = max(self._patience[drafter_id] // 2, _AFTER)
        self._rounds.clear()
        return bool(left)

    def forget(self, drafter_id: str) -> None:
        """It is gone, or another model stands behind its name now."""
        self._absent.pop(drafter_id, None)
        self._patience.pop(drafter_id, None)

    def _learn_of_trial(self, done: PanelRound) -> bool:
        changed = False
        for drafter_id in [one for one in done.answers if one in self._absent]:
            absence, alone = self._absent[drafter_id], frozenset((drafter_id,))
            absence.trials.append(done)
            absence.cost = _share(absence.trials, frozenset(), alone)[1]
            if _gain([done], frozenset(), alone) < 1 / _BETTER:
                # It has paid for itself.
                absence.probes.accepted()
            if len(absence.trials) >= _FEWEST_TRIALS and _gain(absence.trials, frozenset(), alone) < 1 / _BETTER:
                del self._absent[drafter_id]
                self._rounds.clear()
                self.num_changes += 1
                changed = True
        return changed

    def _leave_out(self) -> frozenset[str]:
        """Leave out whom the window was faster without; who they are."""
        rounds, left = self._rounds, frozenset[str]()
        drafter_ids = sorted({drafter_id for done in rounds for drafter_id in done.answers})
        slowest = sorted(set(drafter_ids) - self.exempt, key=lambda one: (-_mean_wait(rounds, one), one))
        # Somebody stays.
        fewest = int(len(slowest) == len(drafter_ids))
        while len(remaining := [one for one in slowest if one not in left]) > fewest:
            # One alone, or all that are as slow as one: of two that are equally slow neither is waited for alone.
            sets = [frozenset(remaining[:count]) for count in range(1, len(remaining) + 1 - fewest)]
            sets += [frozenset((one,)) for one in remaining]
            gains = [_gain(rounds, left, one) for one in sets]
            best = max(range(len(sets)), key=gains.__getitem__)
            if gains[best] < _BETTER:
                break
            left |= sets[best]
        self.num_changes += bool(left)
        for drafter_id in left:
            wait = self._patience.get(drafter_id, _AFTER)
            # One that came back and is left out again is tried less often.
            self._patience[drafter_id] = min(2 * wait, _AT_MOST)
            reason, cost = _judged(rounds, left - {drafter_id}, drafter_id)
            self._absent[drafter_id] = _Absence(reason, Probes(wait, _AT_MOST, _SHARE), cost)
        return left


def _judged(rounds: Iterable[PanelRound], left: frozenset[str], drafter_id: str) -> tuple[str, float]:
    """Why a drafter does not pay where `left` are left out, too; and what a round with it costs, in rounds without."""
    own = [done for done in rounds if drafter_id in done.answers]
    brings, costs = _share(own, left, frozenset((drafter_id,)))
    if 2 * sum(done.answers[drafter_id].seconds is None for done in own) > len(own):
        return SILENT, costs
    return USELESS if brings <= _ASK else SLOW, costs


def _share(rounds: Iterable[PanelRound], left: frozenset[str], out: frozenset[str]) -> tuple[float, float]:
    """What `out` bring beside the others, without `left`, as a part of the tokens; and what they cost, as a part of a
    round without them."""
    brought = saved = tokens = seconds = 0.0
    for done in rounds:
        (lost, gone), (all_lost, all_gone) = done.without(left), done.without(left | out)
        brought, saved = brought + all_lost - lost, saved + all_gone - gone
        tokens, seconds = tokens + done.num_tokens - lost, seconds + done.seconds - all_gone
    return brought / max(tokens, 1.0), saved / max(seconds, 1e-9) + _ASK * len(out)


def _gain(rounds: Iterable[PanelRound], left: frozenset[str], out: frozenset[str]) -> float:
    """Tokens per second without `left` and `out`, of those without `left`."""
    before, after = [0.0, 0.0], [0.0, 0.0]
    for done in rounds:
        for sums, absent in ((before, left), (after, left | out)):
            lost, saved = done.without(absent)
            num_asked = sum(drafter_id not in absent for drafter_id in done.answers)
            sums[0] += done.num_tokens - lost
            sums[1] += (done.seconds - saved) * (1 + _ASK * num_asked)
    if before[0] <= 0 or after[1] <= 0 or before[1] <= 0:
        return 0.0
    return (after[0] / after[1]) / (before[0] / before[1])


def _mean_wait(rounds: Iterable[PanelRound], drafter_id: str) -> float:
    waits = [done.waited(drafter_id) for done in rounds if drafter_id in done.answers]
    return sum(waits) / len(waits)
