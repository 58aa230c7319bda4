"""Recorded CUDA graphs, one per set of sizes: a step of many small kernels then costs one launch.

Recording has never been run on a GPU by this project (see bench/gpu_check.py); without a GPU nothing here is called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_GRAPHS = 96
"""Sizes met later than this many others are computed without a graph."""

WARM_UP_PASSES = 2


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    argument: Tensor
    results: tuple[Tensor, ...]


class Graphs:
    """All graphs share one memory pool: a result must be copied before another graph runs, which `run` does."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._recorded)

    def has_room_for(self, key: Hashable) -> bool:
        return key in self._recorded or len(self._recorded) < MOST_GRAPHS

    def run(self, key: Hashable, compute: Callable[[Tensor], tuple[Tensor, ...]], host: Tensor) -> tuple[Tensor, ...]:
        """compute(host's values, on the device); `host` is pinned. Records `compute` where `key` is new: it must do the
        same to its argument each time, and may be run several times over."""
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(compute, host)
        else:
            recorded.argument.copy_(host, non_blocking=True)
        recorded.graph.replay()
        return tuple(result.clone() for result in recorded.results)

    def _record(self, compute: Callable[[Tensor], tuple[Tensor, ...]], host: Tensor) -> _Recorded:
        argument = host.to(self._device)
        aside, current = torch.cuda.Stream(self._device), torch.cuda.current_stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP_PASSES):
                compute(argument)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may use the device meanwhile: only this one's calls are held to the rules.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = compute(argument)
        return _Recorded(graph, argument, results)
