"""Drafter selection: a drafter that brings less than waiting for it costs is left out, and tried again now and then.

`DrafterSelection` keeps a window of rounds: how far each drafter was right and when its answer was there. Each full
window is played again without some of the drafters: what was accepted on their word alone is lost, and so is the time
for which only they were waited for. If the rest would have been faster, the rest is asked from then on.

The cascade, within one round: expensive drafters need not be asked once the cheap ones have answered and one of them is
sure. A proposal's worth is the tokens that it is expected to bring, by its drafter's own hit rates, as a part of the K
tokens that were asked for: a short proposal leaves room for others, however sure it is.

Pure; durations are arguments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from moot.core.speculation.length import Probes
from moot.core.types import Proposal
from moot.core.voting.calibration import Calibration

ALWAYS_ASK = 1.0
"""The threshold that no expectation reaches."""
_EXPENSIVE = 0.02
"""Part of a round from which waiting for a drafter is expensive."""


def expected_share(proposals: Iterable[Proposal], calibration: Calibration, num_tokens: int) -> float:
    """The greatest expected number of accepted tokens of one proposal over K = `num_tokens`, in [0, 1)."""
    best = 0.0
    for proposal in proposals:
        table = calibration.of(proposal.drafter_id)
        chance = 1.0
        expected = 0.0
        confidences = proposal.confidences or (0,) * len(proposal.token_ids)
        for depth, confidence in enumerate(confidences[:num_tokens]):
            chance *= table.rate(confidence, depth)
            expected += chance
        best = max(best, expected / num_tokens)
    return best


def is_expensive(answer_seconds: float | None, round_seconds: float | None) -> bool:
    """Whether a drafter's answers take so large a part of a round that skipping it is worth while. None: not known; it
    is asked."""
    return answer_seconds is not None and round_seconds is not None and answer_seconds > _EXPENSIVE * round_seconds


PAYING, ALL = "paying", "all"
SELECTIONS = (PAYING, ALL)
"""Drafters that rounds ask: those that bring more than waiting for them costs, or all."""
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
_BETTER, _MUCH_BETTER = 1.001, 1.01
"""How much faster the rest must have been where nothing is lost, and where something is: a window is a sample."""
_EARLY: Final = 0.05
"""And how much more for each window that is missing in a part of one: what stops rounds is not waited with."""
_NEW: Final = 0.25
"""Part of a window for which the time of drafting is not held against drafting: it may be that of a drafter that is
left out as soon as it is known, and without rounds that draft none gets known."""
_SHORTEST_S: Final = 1e-9
_TRIALS: Final = 8
"""The latest rounds in which a drafter that is left out was tried."""
_FEWEST_TRIALS: Final = 4
_AFTER, _SELDOM, _AT_MOST = 8, 64, 1024
"""Rounds until the first trial, between later ones, and until the first of one that has come back again and again."""
_SHARE: Final = 0.005
"""Part of the time that trying may take, of all drafters together that are left out."""


class DrafterAnswer(NamedTuple):
    """The answer of one drafter that was asked in a round. `num_right`: leading tokens of its best proposal that were
    accepted; `seconds`: from asking to its answer; None: it did not come before the vote."""

    num_right: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SelectionRound:
    """A round that drafted. `draft_seconds`: from asking to the vote; `seconds`: from asking to the commit."""

    answers: Mapping[str, DrafterAnswer]
    num_accepted: int
    num_tokens: int
    draft_seconds: float
    seconds: float


class _Played:
    """Rounds in columns, to be played again without some drafters. A drafter that was not asked in a round was neither
    right nor waited for there."""

    def __init__(self, rounds: Sequence[SelectionRound]) -> None:
        self.drafter_ids = sorted({drafter_id for done in rounds for drafter_id in done.answers})
        self.num_asked = dict.fromkeys(self.drafter_ids, 0)
        self.num_silent = dict.fromkeys(self.drafter_ids, 0)
        self._num_rounds = len(rounds)
        self._accepted = [done.num_accepted for done in rounds]
        self._tokens = sum([done.num_tokens for done in rounds])
        self._seconds = sum([done.seconds for done in rounds])
        self._right = {drafter_id: [0] * len(rounds) for drafter_id in self.drafter_ids}
        self._waits = {drafter_id: [0.0] * len(rounds) for drafter_id in self.drafter_ids}
        for index, done in enumerate(rounds):
            for drafter_id, (num_right, seconds) in done.answers.items():
                self.num_asked[drafter_id] += 1
                self.num_silent[drafter_id] += seconds is None
                self._right[drafter_id][index] = num_right
                # The vote went on without those that were later.
                wait = done.draft_seconds if seconds is None else min(seconds, done.draft_seconds)
                self._waits[drafter_id][index] = wait
        nothing = [0.0] * len(rounds)
        self._waited = sum(map(max, *self._waits.values(), nothing, nothing))

    def mean_wait(self, drafter_id: str) -> float:
        return sum(self._waits[drafter_id]) / self.num_asked[drafter_id]

    def without(self, left_out: Set[str]) -> tuple[float, float]:
        """Tokens that the rounds would have brought, and seconds that they would have taken."""
        kept = [drafter_id for drafter_id in self.drafter_ids if drafter_id not in left_out]
        nothing = [0] * self._num_rounds
        right = map(max, *[self._right[drafter_id] for drafter_id in kept], nothing, nothing)
        waits = map(max, *[self._waits[drafter_id] for drafter_id in kept], nothing, nothing)
        tokens = self._tokens - sum(self._accepted) + sum(map(min, self._accepted, right))
        return tokens, max(self._seconds - self._waited + sum(waits), _SHORTEST_S)

    def speed(self, left_out: Set[str]) -> float:
        """Tokens per second without the drafters left out."""
        tokens, seconds = self.without(left_out)
        asked = sum([count for drafter_id, count in self.num_asked.items() if drafter_id not in left_out])
        return tokens / (seconds * (1 + _ASK * asked / self._num_rounds))

    def gain(self, before: Set[str], after: Set[str]) -> float:
        """How much faster than needed the rest is without the drafters `after`, if those `before` are left out already:
        a factor less 1."""
        loses = self.without(after)[0] < (1 - _ASK) * self.without(before)[0]
        return self.speed(after) / (self.speed(before) * (_MUCH_BETTER if loses else _BETTER)) - 1

    def share(self, drafter_id: str, left_out: Set[str]) -> tuple[float, float]:
        """What a drafter brings beside the others, without `left_out`, as a part of the tokens; and what it costs, as a
        part of the time without it."""
        tokens, seconds = self.without(left_out - {drafter_id})
        tokens_without, seconds_without = self.without(left_out | {drafter_id})
        return (tokens - tokens_without) / max(tokens, 1.0), seconds / seconds_without - 1 + _ASK


@dataclass(slots=True)
class _Absence:
    """A drafter that is left out, and how it did when it was tried."""

    reason: str
    probes: Probes
    cost: float
    """Of a round with it, in rounds without."""
    trials: deque[SelectionRound] = field(default_factory=lambda: deque(maxlen=_TRIALS))


class DrafterSelection:
    """The drafter selection of one router, for all its requests. The last drafter is never left out: whether drafting
    pays at all is the length policy's to say."""

    def __init__(self) -> None:
        self.exempt: set[str] = set()
        """Drafters that are asked whatever they bring: what they cost shows elsewhere."""
        self.num_changes = 0
        self._rounds: list[SelectionRound] = []
        self._num_seen = 0
        self._absent: dict[str, _Absence] = {}
        self._patience: dict[str, int] = {}

    @property
    def left_out(self) -> Mapping[str, str]:
        """Drafter id to one of REASONS, of the drafters that are asked only to try them."""
        return {drafter_id: absence.reason for drafter_id, absence in self._absent.items()}

    def choose(self, drafter_ids: Sequence[str]) -> Sequence[str]:
        """Those of a request's drafters that a round asks. Call it once for each round that drafts: it counts rounds,
        and may name one that is left out, to try it. Where all would be left out, all are asked."""
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
        """Whether a round that asked these drafters tried one that is left out: its wait is no usual one."""
        return bool(self._absent) and not self._absent.keys().isdisjoint(drafter_ids)

    def learn(self, done: SelectionRound, num_requests: int = 1) -> bool:
        """Learn from a round. `num_requests`: of the verify step. Returns whether learned draft times are void: other
        drafters are waited for from now on, or it is not known yet which ones rounds will wait for."""
        if self.is_trial(done.answers):
            return self._learn_of_trial(done)
        self._rounds.append(done)
        size = WINDOW + _WINDOW_PER_REQUEST * (num_requests - 1)
        is_new = self._num_seen < size * _NEW and len(done.answers) > 1
        self._num_seen += is_new
        return self._judge(size) or is_new

    def _judge(self, size: int) -> bool:
        """Judge by what there is of a window of `size` rounds, where it is time to. Returns whether a drafter was left
        out."""
        count, eighth = len(self._rounds), size // 8
        if count >= size or count in (size // 4, size // 2):
            left = self._leave_out(played := _Played(self._rounds), _EARLY * max(size / count - 1, 0))
            if count >= size or left:
                self._keep(set(played.drafter_ids) - left)
                return bool(left)
        if count % eighth:
            return False
        # A drafter may turn slow at any time. One pause of the machine is none of its doing.
        latest = self._rounds[-eighth:]
        latest.remove(max(latest, key=lambda one: one.draft_seconds))
        left = self._leave_out(played := _Played(latest), _EARLY * (size / eighth - 1))
        if left:
            self._keep(set(played.drafter_ids) - left)
        return bool(left)

    def _keep(self, drafter_ids: Set[str]) -> None:
        """A window is over, and these drafters stay."""
        for drafter_id in drafter_ids:
            if drafter_id in self._patience:
                self._patience[drafter_id] = max(self._patience[drafter_id] // 2, _AFTER)
        self._rounds.clear()

    def forget(self, drafter_id: str) -> None:
        """The drafter is gone, or another model stands behind its name now."""
        self.num_changes += self._absent.pop(drafter_id, None) is not None
        self._patience.pop(drafter_id, None)

    def _learn_of_trial(self, done: SelectionRound) -> bool:
        changed = False
        for drafter_id in [one for one in done.answers if one in self._absent]:
            absence, alone = self._absent[drafter_id], {drafter_id}
            absence.trials.append(done)
            last, trials = _Played([done]), _Played(list(absence.trials))
            absence.cost = trials.share(drafter_id, frozenset())[1]
            if last.speed(frozenset()) > _BETTER * last.speed(alone):
                # It has paid for itself.
                absence.probes.accepted()
            pays = trials.speed(frozenset()) > _BETTER * trials.speed(alone)
            if pays and len(absence.trials) >= _FEWEST_TRIALS:
                del self._absent[drafter_id]
                self._rounds.clear()
                self.num_changes += 1
                changed = True
        return changed

    def _leave_out(self, played: _Played, more: float) -> frozenset[str]:
        """Leave out the drafters without which the window was faster, by `more` than else is enough. Returns their
        ids."""
        left = frozenset[str]()
        slowest = sorted(set(played.drafter_ids) - self.exempt, key=lambda one: (-played.mean_wait(one), one))
        # At least one drafter stays.
        fewest = int(len(slowest) == len(played.drafter_ids))
        while len(remaining := [one for one in slowest if one not in left]) > fewest:
            # One alone, or all that are as slow as one: of two that are equally slow neither is waited for alone.
            sets = {left.union(remaining[:count]) for count in range(1, len(remaining) + 1 - fewest)}
            sets |= {left | {one} for one in remaining}
            paying = [one for one in sorted(sets, key=sorted) if played.gain(left, one) > more]
            if not paying:
                break
            found = max(paying, key=played.speed)
            for drafter_id in sorted(found - left):
                # Not along with another: each must have been expensive itself.
                if played.gain(found - {drafter_id}, found) <= more:
                    found -= {drafter_id}
            if found == left:
                break
            left = found
        self.num_changes += bool(left)
        for absence in self._absent.values() if left else ():
            # What it brings beside others is another question now.
            absence.trials.clear()
            absence.probes.start_over()
        for drafter_id in left:
            wait = self._patience.get(drafter_id, _AFTER)
            # One that came back and is left out again is tried less often.
            self._patience[drafter_id] = min(2 * wait, _AT_MOST)
            brings, costs = played.share(drafter_id, left)
            reason = USELESS if brings <= _ASK else SLOW
            if 2 * played.num_silent[drafter_id] > played.num_asked[drafter_id]:
                reason = SILENT
            probes = Probes(wait, max(wait, _SELDOM), _SHARE)
            self._absent[drafter_id] = _Absence(reason, probes, costs)
        return left
