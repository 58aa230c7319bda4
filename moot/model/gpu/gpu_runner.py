"""`ModelRunner` for accelerators: one upload, one recorded graph, no waiting inside a step.

A step consists of many small kernels; with a recorded CUDA graph for each set of sizes it costs one launch. On a CPU
the runner uses plain operations and no graphs: that is how it is tested.

Neither the runner nor the recording has ever been run on a GPU by this project; lab.bench.gpu_check is the command to
do so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.errors import ConfigError, ModelRefused
from moot.model.gpu.lean import LeanModel, tiled_linear
from moot.model.gpu.paged_attention import kernel_supports
from moot.model.gpu.plan import Planner, Sizes, unpack
from moot.model.gpu.pool import PagedCache, PagedPool, upload
from moot.model.inputs import SequenceInput, check_inputs
from moot.model.loading.drivable import distance, most_distance
from moot.model.loading.load import LoadedModel
from moot.model.rows import Padding, RowRules
from moot.model.runner import ModelRunner, no_progress

MOST_GRAPHS = 96
"""Sizes met later than this many others are computed without a graph."""

WARM_UP_PASSES = 2


@dataclass(frozen=True, slots=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    argument: Tensor
    results: tuple[Tensor, ...]


class Graphs:
    """The recorded graphs of a runner. They share one memory pool: a result must be copied before another graph runs,
    which `run` does."""

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


TILE_ROWS = 64
"""Rows of each product in batch-invariant mode. Weights are streamed once for all of them: fewer cost the same."""

BATCH_INVARIANT_RULES = RowRules(TILE_ROWS, Padding(TILE_ROWS, TILE_ROWS), Padding(1, 1), True)

MOST_GRAPH_ROWS = 256
"""Steps with more rows are long enough to hide their launches."""

_PROOF_TOKENS = 24


class GpuRunner(ModelRunner):
    """The runner for accelerators: the contract of `ModelRunner`, over paged caches. Raises ModelRefused for models
    that `LeanModel` refuses, or whose logits differ from the loaded model's own.

    Batch-invariant mode: products have exactly TILE_ROWS rows, and attention's portions depend on positions alone. A
    check at start compares products bit by bit beside other rows and raises ConfigError where they differ. `use_kernel`
    None: where the device and the number format allow it. `use_graphs` None: on a GPU; elsewhere it means that steps
    are padded as graphs need it, and computed without one.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        kv_capacity_tokens: int,
        batch_invariant: bool,
        use_kernel: bool | None = None,
        use_graphs: bool | None = None,
    ) -> None:
        shape = loaded.kv_shape
        self.use_kernel = (
            kernel_supports(shape.dtype, shape.device, shape.head_dim) if use_kernel is None else use_kernel
        )
        super().__init__(loaded, kv_capacity_tokens, BATCH_INVARIANT_RULES if batch_invariant else None)
        linear = tiled_linear(TILE_ROWS) if batch_invariant else torch.nn.functional.linear
        self.lean = LeanModel(loaded, self.use_kernel, linear)
        if batch_invariant:
            check_products(self.lean.weights)
        self.pool: PagedPool = PagedPool(shape, kv_capacity_tokens)
        # Off until the proof below has passed: its few tokens are not worth a graph.
        self._rounds_sizes = False
        self.graphs: Graphs | None = None
        _prove_equal(self)
        self._rounds_sizes = shape.device.type == "cuda" if use_graphs is None else use_graphs
        if self._rounds_sizes and shape.device.type == "cuda":
            self.graphs = Graphs(shape.device)

    def new_cache(self) -> PagedCache:
        return PagedCache(self.pool)

    @torch.inference_mode()
    def forward(
        self,
        inputs: Sequence[SequenceInput],
        progress: Callable[[], None] = no_progress,
        layers: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """As `ModelRunner.forward`; returns before the device has finished. `progress` is called at both ends."""
        progress()
        counts = [len(item.logit_rows) for item in inputs]
        self._states.begin(counts)
        planner, moves = self._plan_inputs(inputs)
        if moves:
            self.pool.move(*zip(*moves, strict=True))
        if not planner.token_ids:
            return [self._no_logits() for _ in inputs]
        logits, *states = self._run(planner, layers)
        if states:
            self._states.keep(range(sum(counts)), states[0])
        progress()
        return list(logits[: sum(counts)].split(counts))

    @property
    def way(self) -> str:
        return "paged, " + ("attention by a kernel" if self.use_kernel else "attention by torch")

    @property
    def can_skip_layers(self) -> bool:
        return True

    def _plan_inputs(self, inputs: Sequence[SequenceInput]) -> tuple[Planner, list[tuple[int, int]]]:
        checked = check_inputs(inputs, PagedCache, self.loaded.num_embeddings, self.info.context_limit)
        planner = Planner(self.pool, TILE_ROWS if self.batch_invariant else 1)
        fed = [item for item in checked if item.depths]
        for item in fed:
            planner.add(item)
        # Nothing below raises: moves that are taken are done.
        return planner, [move for item in fed for move in item.cache.take_moves()]

    def _run(self, planner: Planner, layers: tuple[int, ...] | None) -> tuple[Tensor, ...]:
        rounds = self._rounds_sizes and len(planner.token_ids) <= MOST_GRAPH_ROWS
        sizes, packed = planner.finish(exact=not rounds)
        key = (sizes, self._states.keeps, layers)
        if rounds and self.graphs is not None and self.graphs.has_room_for(key):
            host = torch.from_numpy(packed).pin_memory()
            return self.graphs.run(key, lambda uploaded: self._compute(sizes, uploaded, layers), host)
        return self._compute(sizes, upload(packed, self.device), layers)

    def _compute(self, sizes: Sizes, uploaded: Tensor, layers: tuple[int, ...] | None) -> tuple[Tensor, ...]:
        """Logits, and their rows' hidden states where they are kept: a graph copies what it returns."""
        logits, states = self.lean.forward(unpack(sizes, uploaded), self.pool.layers, layers)
        return (logits, states) if self._states.keeps else (logits,)


@torch.inference_mode()
def check_products(weights: Sequence[Tensor]) -> None:
    """Compare rows of products with the same rows in another place and among others, bit by bit. Raises ConfigError."""
    seen: set[tuple[int, int]] = set()
    for weight in weights:
        if (shape := (weight.shape[0], weight.shape[1])) in seen:
            continue
        seen.add(shape)
        generator = torch.Generator().manual_seed(len(seen))
        rows = torch.randn(TILE_ROWS, shape[1], generator=generator).to(weight)
        whole = torch.nn.functional.linear(rows, weight)
        shifted = torch.nn.functional.linear(rows.roll(11, 0), weight).roll(-11, 0)
        alone = torch.zeros_like(rows)
        alone[5] = rows[5]
        single = torch.nn.functional.linear(alone, weight)[5]
        if not torch.equal(whole, shifted) or not torch.equal(whole[5], single):
            raise ConfigError(
                f"batch-invariant mode does not hold: products with a weight of {shape} depend on other rows"
            )


@torch.inference_mode()
def _prove_equal(runner: GpuRunner) -> None:
    """Run a few tokens in two chunks, and compare with the loaded model driven by ModelRunner."""
    limit = min(_PROOF_TOKENS, runner.info.context_limit)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(runner.info.vocab_size, (limit,), generator=generator).tolist()
    plain = ModelRunner(runner.loaded, limit)
    (expected,) = plain.forward([SequenceInput(plain.new_cache(), token_ids, None, range(limit))])
    cache, found, first = runner.new_cache(), [], max(1, limit - 5)
    for chunk in (token_ids[:first], token_ids[first:]):
        if chunk:
            found += runner.forward([SequenceInput(cache, chunk, None, range(len(chunk)))])
            cache.commit(range(len(chunk)))
    cache.free()
    apart = distance(torch.cat(found), expected)
    if not apart <= most_distance(runner.dtype):
        raise ModelRefused(f"{runner.info.model}: logits differ from the model's own by {apart:.2g}")
