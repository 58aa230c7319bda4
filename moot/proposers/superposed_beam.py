"""The sequences that one superposed row stands for: how they grow, which of them survive, what is proposed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moot.proposers.neural_session import Drafted


@dataclass(frozen=True, slots=True)
class Grown:
    """A sequence after the prefix. `share`: its probability as a whole; `is_over`: nothing can follow it."""

    path: tuple[Drafted, ...] = ()
    share: float = 1.0
    is_over: bool = False

    @property
    def token_ids(self) -> list[int]:
        return [token for token, _ in self.path]


@dataclass(slots=True)
class Beam:
    """At most `num_sequences` sequences, the most probable first."""

    num_sequences: int
    sequences: list[Grown] = field(default_factory=lambda: [Grown()])
    fallen: list[Grown] = field(default_factory=list)
    """Those that were in the beam until all that might follow them was less probable than others."""
    is_mixed: bool = False
    """A row of several sequences was fed: no row is of one sequence alone any more."""

    @property
    def live(self) -> list[Grown]:
        return [one for one in self.sequences if not one.is_over]

    def mixture(self) -> tuple[list[int], list[float]]:
        """Last ids of the live sequences, and their probabilities, normalised."""
        live = self.live
        total = sum(one.share for one in live)
        return [one.path[-1][0] for one in live], [one.share / total for one in live]

    def grow(self, shares: Sequence[Mapping[int, float]], ending: frozenset[int], least: float) -> None:
        """One token more for each live sequence: of the best `num_sequences` continuations of each, the best survive.

        `shares`: for each live sequence the ids that may follow with their conditional probabilities, of equal ones the
        preferred first. `ending`: ids that nothing follows; `least`: no id less probable follows. A sequence that
        nothing may follow is over.
        """
        over, live = [one for one in self.sequences if one.is_over], self.live
        found = [(one, one) for one in over]
        for one, own in zip(live, shares, strict=True):
            best = sorted(((token, share) for token, share in own.items() if share >= least and share > 0.0), key=_rank)
            if not best:
                found.append((Grown(one.path, one.share, True), one))
            for token, share in best[: self.num_sequences]:
                path = (*one.path, (token, round(255 * min(share, 1.0))))
                found.append((Grown(path, one.share * share, token in ending), one))
        found.sort(key=lambda pair: -pair[0].share)
        del found[self.num_sequences :]
        survived = {id(parent) for _, parent in found}
        self.fallen += [one for one in (*over, *live) if one.path and id(one) not in survived]
        self.sequences = [one for one, _ in found]

    def proposals(self, width: int) -> list[tuple[Drafted, ...]]:
        """The sequences, best first, then those that fell, the most probable first. None begins another."""
        fallen = sorted(self.fallen, key=lambda one: -one.share)
        return [one.path for one in (*self.sequences, *fallen) if one.path][:width]


def _rank(entry: tuple[int, float]) -> float:
    return -entry[1]
