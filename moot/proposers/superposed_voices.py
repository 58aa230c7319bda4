"""Which continuation of a superposed row belongs to which sequence: what a table of n-grams says of each. Pure.

A row p is of all sequences at once. After the last ids of one of them the table has an opinion of its own, smoothed
order by order (Dirichlet, as MacKay and Peto 1995): with `total` occurrences of a context, of which `counts` are kept,

    q_n(x) = (count_n(x) + (strength + total - sum of counts) * q_{n-1}(x)) / (total + strength),    q_0 = p

so that contexts that were never seen change nothing. A sequence's shares are the geometric interpolation of the paper
(arXiv 2405.18400), p(x)^(1-weight) * q(x)^weight, normalised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moot.proposers.ngram_table import NgramTable

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
