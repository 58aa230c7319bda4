"""Which drafters a system on one machine has, and where each of them runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moot.proposers.entries import INSIDE_KINDS, DrafterEntry, parse_entries
from moot.proposers.registry import MODEL_FREE_KINDS

AUTO = "auto"
DEMO_ELECTORATE = (
    "suffix:datastore=shipped@suffix-smollm2-135m",
    "prompt_lookup",
    "recycling",
    "ngram:table=shipped@ngram-smollm2-135m",
)
"""The best found for the demo's target on two cores (docs/performance.md). Its heads know what none of these knows, and
take a fifth of a round to say so: `heads:path=shipped@heads-smollm2-135m`."""
ANY_ELECTORATE = ("suffix", "prompt_lookup", "recycling")
"""For a target that no drafter here was trained for."""


@dataclass(frozen=True, slots=True)
class Electorate:
    """`in_verifier`: kinds that look into the target; `in_router`: kinds without a model, whose work takes less than
    the way to another process and back (docs/decisions/0012-where-drafters-run.md); `processes`: the others."""

    in_verifier: tuple[DrafterEntry, ...]
    in_router: tuple[DrafterEntry, ...]
    processes: tuple[DrafterEntry, ...]

    @property
    def drafter_ids(self) -> tuple[str, ...]:
        return tuple(entry.drafter_id for entry in (*self.in_router, *self.processes, *self.in_verifier))


def electorate(drafters: Sequence[str], *, is_demo: bool, as_processes: bool) -> Electorate:
    """`drafters`: entries, or AUTO alone for the best that is known. `as_processes`: none in the router.

    Raises ConfigError naming --drafters and the bad entry.
    """
    if tuple(drafters) == (AUTO,):
        drafters = DEMO_ELECTORATE if is_demo else ANY_ELECTORATE
    entries = parse_entries(drafters, "--drafters")
    inside = [entry for entry in entries if entry.kind in INSIDE_KINDS]
    light = [entry for entry in entries if entry.kind in MODEL_FREE_KINDS and not as_processes]
    others = [entry for entry in entries if entry not in inside and entry not in light]
    return Electorate(tuple(inside), tuple(light), tuple(others))
