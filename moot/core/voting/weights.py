"""Weights: one number per drafter, and how it moves. Weights of one request sum to 1 over its drafter set.

`minions` (2402.15678): the winner alone is rewarded or punished. `hedge` (default; multiplicative weights, HedgeSpec
2510.20064): every drafter by what its own proposal would have won. `uniform`: never. They start from the pool's running
weights and flow back into them when the request ends.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moot.core.types import Proposal


@dataclass(frozen=True, slots=True)
class Contest:
    """The outcome of a round for its drafters. `token_ids`: committed by it. `winner_ids`: behind the whole voted
    path."""

    num_speculative_tokens: int
    proposals: Sequence[Proposal]
    token_ids: Sequence[int]
    winner_ids: Sequence[str] = ()
    num_drafted: int = 0
    """Tokens of the voted path that were verified."""
    num_accepted: int = 0


class Weights(ABC):
    """Weights of one request. Each is at least `floor` before normalising, so that no drafter is silenced for good."""

    def __init__(self, start: Mapping[str, float], floor: float = 0.02) -> None:
        if floor <= 0:
            raise ValueError("floor must be positive")
        self._floor = floor
        self._numbers = dict(start)
        self._normalise()

    @property
    def numbers(self) -> Mapping[str, float]:
        return self._numbers

    @abstractmethod
    def observe(self, contest: Contest) -> None:
        """Learn from one round. Rounds must be observed in order, each committed token once."""

    def finish(self) -> None:  # noqa: B027 - most policies keep nothing open
        """The request has ended, or its text went on unobserved: settle what is open."""

    def _normalise(self) -> None:
        floored = {id_: max(number, self._floor) for id_, number in self._numbers.items()}
        total = sum(floored.values())
        self._numbers = {id_: number / total for id_, number in floored.items()}

    def _admit(self, drafter_ids: Sequence[str]) -> None:
        """A drafter that joins a running request starts with an average weight."""
        unknown = [id_ for id_ in drafter_ids if id_ not in self._numbers]
        if unknown:
            average = 1.0 / len(self._numbers) if self._numbers else 1.0
            self._numbers.update(dict.fromkeys(unknown, average))
            self._normalise()


class Uniform(Weights):
    """Equal weights, whatever happens."""

    def __init__(self, start: Mapping[str, float], floor: float = 0.02) -> None:
        super().__init__(dict.fromkeys(start, 1.0), floor)

    def observe(self, contest: Contest) -> None:
        self._admit([proposal.drafter_id for proposal in contest.proposals])


class MinionsWeights(Weights):
    """Weights that move for winners only: accepted / drafted of the round at least `threshold` multiplies by `reward`,
    below by `penalty`."""

    def __init__(
        self,
        start: Mapping[str, float],
        floor: float = 0.02,
        threshold: float = 0.5,
        reward: float = 1.1,
        penalty: float = 0.9,
    ) -> None:
        super().__init__(start, floor)
        self._threshold, self._reward, self._penalty = threshold, reward, penalty

    def observe(self, contest: Contest) -> None:
        self._admit([proposal.drafter_id for proposal in contest.proposals])
        if not contest.num_drafted or not contest.winner_ids:
            return
        good = contest.num_accepted >= self._threshold * contest.num_drafted
        for drafter_id in contest.winner_ids:
            self._numbers[drafter_id] *= self._reward if good else self._penalty
        self._normalise()


@dataclass(slots=True)
class _Open:
    """A round some of whose proposals agree with the text as far as it goes. `gains[id]` counts leading tokens."""

    length: int
    gains: dict[str, int]
    chains: list[tuple[str, tuple[int, ...]]]
    """Still agreeing."""
    num_known: int


class Hedge(Weights):
    """Every drafter that proposed: w *= exp(eta * gain), gain = leading tokens of the own proposal that were committed,
    over K.

    The gain of a proposal is censored where the committed text ends. A round is settled when all its gains are known,
    which takes K tokens at most. Drafters that abstained keep their weight: the others share what they had together.
    """

    def __init__(self, start: Mapping[str, float], floor: float = 0.02, eta: float = 0.3) -> None:
        super().__init__(start, floor)
        self._eta = eta
        self._open: list[_Open] = []

    @property
    def num_open_rounds(self) -> int:
        return len(self._open)

    def observe(self, contest: Contest) -> None:
        if contest.proposals:
            self._admit([proposal.drafter_id for proposal in contest.proposals])
            length = max(contest.num_speculative_tokens, 1)
            chains = [(proposal.drafter_id, proposal.token_ids) for proposal in contest.proposals]
            self._open.append(_Open(length, {id_: 0 for id_, _ in chains}, chains, 0))
        still_open: list[_Open] = []
        settled = False
        for entry in self._open:
            _follow(entry, contest.token_ids)
            if entry.chains:
                still_open.append(entry)
            else:
                self._settle(entry)
                settled = True
        self._open = still_open
        if settled:
            self._normalise()

    def finish(self) -> None:
        """Open rounds count as far as the text went: no less than any gain known in the same round."""
        for entry in self._open:
            self._settle(entry)
        if self._open:
            self._normalise()
        self._open = []

    def _settle(self, entry: _Open) -> None:
        numbers = self._numbers
        before = sum([numbers[id_] for id_ in entry.gains])
        for id_, gain in entry.gains.items():
            numbers[id_] *= math.exp(self._eta * min(gain / entry.length, 1.0))
        scale = before / sum([numbers[id_] for id_ in entry.gains])
        for id_ in entry.gains:
            numbers[id_] *= scale


def _follow(entry: _Open, token_ids: Sequence[int]) -> None:
    start = entry.num_known
    end = start + len(token_ids)
    agreeing: list[tuple[str, tuple[int, ...]]] = []
    for id_, chain in entry.chains:
        matched = start
        stop = min(end, len(chain))
        while matched < stop and chain[matched] == token_ids[matched - start]:
            matched += 1
        if matched > entry.gains[id_]:
            entry.gains[id_] = matched
        if matched == end and matched < len(chain):
            agreeing.append((id_, chain))
    entry.chains = agreeing
    entry.num_known = end


WEIGHTS: dict[str, type[Weights]] = {"hedge": Hedge, "minions": MinionsWeights, "uniform": Uniform}


class PoolWeights:
    """Running weights per drafter: where a request starts, and what it leaves behind.

    A finished request moves its drafters' share `rate` of the way to its own weights; drafters that were not in its
    drafter set keep theirs.
    """

    def __init__(self, rate: float = 0.1, priors: Mapping[str, float] | None = None) -> None:
        """`priors`: what drafters start with that are not average."""
        if not 0 < rate <= 1:
            raise ValueError("rate must be in (0, 1]")
        if any(not 0 < prior < math.inf for prior in (priors or {}).values()):
            raise ValueError("priors must be positive and finite")
        self._rate = rate
        self._priors = dict(priors or {})
        self._numbers: dict[str, float] = {}

    @property
    def numbers(self) -> Mapping[str, float]:
        """Per drafter ever seen; 1 is average."""
        return self._numbers

    def start(self, drafter_ids: Sequence[str]) -> dict[str, float]:
        """Weights, summing to 1, for a request that uses these drafters."""
        numbers = {id_: self._number(id_) for id_ in drafter_ids}
        total = sum(numbers.values())
        return {id_: number / total for id_, number in numbers.items()}

    def flow_back(self, weights: Mapping[str, float]) -> None:
        """`weights`: what `numbers` of a finished request's Weights were."""
        total = sum(self._number(id_) for id_ in weights)
        for id_, weight in weights.items():
            self._numbers[id_] += self._rate * (weight * total - self._numbers[id_])

    def _number(self, drafter_id: str) -> float:
        return self._numbers.setdefault(drafter_id, self._priors.get(drafter_id, 1.0))

    def forget(self, drafter_id: str) -> None:
        """Forget a drafter: it starts anew, with what it started with."""
        self._numbers.pop(drafter_id, None)
