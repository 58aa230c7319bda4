"""The sequences that one superposed row stands for: how they grow, which of them survive, what is proposed. Pure.

Which continuation of a superposed row belongs to which sequence: what a table of n-grams says of each. Pure.

A row p is of all sequences at once. After the last ids of one of them the table has an opinion of its own, smoothed
order by order (Dirichlet, as MacKay and Peto 1995): with `total` occurrences of a context, of which `counts` are kept,

    q_n(x) = (count_n(x) + (strength + total - sum of counts) * q_{n-1}(x)) / (total + strength),    q_0 = p

so that contexts that were never seen change nothing. A sequence's shares are the geometric interpolation of the paper
(arXiv 2405.18400), p(x)^(1-weight) * q(x)^weight, normalised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.neural.neural_sessions import Drafted

Likely = Mapping[int, tuple[float, float]]
"""By id: its share of the row, noise included where there is some, and its probability p without."""


@dataclass(frozen=True, slots=True)
class Voice:
    """q(x) = scale * p(x) + extra(x), whatever p is."""

    scale: float = 1.0
    extra: Mapping[int, float] = field(default_factory=dict)


SILENT = Voice()
"""q = p."""


def voice_after(table: NgramTable, context: Sequence[int], strength: float, vocab_size: int) -> Voice:
    """What `table` says after `context`, all of it or its end. `strength`: in occurrences, above 0."""
    scale, extra = 1.0, dict[int, float]()
    for order in range(1, min(table.max_order, len(context)) + 1):
        found = table.lookup(context[-order:])
        if found is None:
            break
        kept = [
            (token, count) for token, count in zip(found.token_ids, found.counts, strict=True) if token < vocab_size
        ]
        everything = found.total + strength
        passed_on = (everything - sum(count for _, count in kept)) / everything
        scale *= passed_on
        extra = {token: share * passed_on for token, share in extra.items()}
        for token, count in kept:
            extra[token] = extra.get(token, 0.0) + count / everything
    return Voice(scale, extra) if extra else SILENT


def interpolated(likely: Likely, voice: Voice, weight: float) -> dict[int, float]:
    """Shares of one sequence, in the order of `likely`, which must hold every id of `voice.extra` that is possible.

    `weight`: of the voice, in 0..1. All other ids of the row share what is missing to 1.
    """
    if voice is SILENT or weight == 0.0:
        return {token: share for token, (share, _) in likely.items()}
    raised = {
        token: share * (voice.scale + (voice.extra.get(token, 0.0) / chance)) ** weight
        for token, (share, chance) in likely.items()
        if chance > 0.0
    }
    known = [token for token in voice.extra if token in raised]
    others = max(1.0 - sum(likely[token][0] for token in known), 0.0)
    total = voice.scale**weight * others + sum(raised[token] for token in known)
    return {token: value / total for token, value in raised.items()}


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
