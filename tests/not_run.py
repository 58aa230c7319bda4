"""The one line at the end of a run of tests on what did not run: how many, why, and what brings them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def summed_up(reasons: Sequence[str]) -> str:
    """`reasons`, one a test, as `why: what brings it`; those that the same thing brings are told together."""
    parted = [reason.rpartition(": ") for reason in reasons]
    counts = Counter(remedy for _, _, remedy in parted)
    parts = []
    for remedy, count in counts.most_common():
        whys = ", ".join(sorted({why for why, _, one in parted if one == remedy} - {""}))
        parts.append(f"{count} {whys}: {remedy}" if whys else f"{count} {remedy}")
    return f"{len(reasons)} tests did not run: {'; '.join(parts)}"
