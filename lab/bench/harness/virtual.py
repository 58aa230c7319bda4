"""Comparisons in virtual time: fixed choices and the policy on the same seeds, one simulation per process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Protocol

from lab.bench.harness.intervals import Interval, ratios
from lab.bench.harness.pages import PageConfig
from moot.config import option
from moot.simulation.machine_costs import StepCost
from moot.simulation.world import SimulatedOutcome

CPU = StepCost.line(0.037, 0.0025, 16, 0.0002)
GPU = StepCost.line(0.030, 0.0002, 64, 0.00002)
"""Seconds of a step on two cores of a CPU, and like those on a GPU."""
FIRST_SEED = 11
"""Not those on which the policy's constants were chosen."""


class Map(Protocol):
    """`map`, of one process or of several."""

    def __call__(
        self, function: Callable[[Any], SimulatedOutcome], jobs: Iterable[Any], /
    ) -> Iterable[SimulatedOutcome]: ...


@contextmanager
def all_cores() -> Iterator[Map]:
    """A map over processes, as many as there are cores."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=get_context("spawn")) as processes:
        yield processes.map


@dataclass(frozen=True, kw_only=True)
class VirtualConfig(PageConfig):
    seeds: int = option(7, help="seeds of every arm")

    @property
    def chosen(self) -> range:
        return range(FIRST_SEED, FIRST_SEED + self.seeds)


@dataclass(frozen=True, slots=True)
class AgainstFixed:
    """Per seed: tokens per second of every fixed choice, and what the policy did."""

    fixed: dict[int, list[float]]
    policy: list[SimulatedOutcome]

    @property
    def best(self) -> int:
        """The choice with the most tokens over all seeds."""
        return max(self.fixed, key=lambda choice: sum(self.fixed[choice]))

    def of(self, choice: int) -> Interval:
        """The policy's tokens per second, of those of a fixed choice on the same requests."""
        return ratios([one.tokens_per_s for one in self.policy], self.fixed[choice])


def against_fixed(
    simulate: Callable[[int | None, int], SimulatedOutcome],
    choices: Sequence[int],
    seeds: Sequence[int],
    run: Map = map,
) -> AgainstFixed:
    """`simulate`: of a fixed choice (None: the policy) and a seed; it must be picklable."""
    jobs = [(choice, seed) for choice in (*choices, None) for seed in seeds]
    found = dict(zip(jobs, run(partial(_spread, simulate), jobs), strict=True))
    fixed = {choice: [found[choice, seed].tokens_per_s for seed in seeds] for choice in choices}
    return AgainstFixed(fixed, [found[None, seed] for seed in seeds])


def _spread(simulate: Callable[[int | None, int], SimulatedOutcome], job: tuple[int | None, int]) -> SimulatedOutcome:
    return simulate(*job)
