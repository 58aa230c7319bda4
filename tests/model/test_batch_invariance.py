"""Batch-invariant mode: a token's logits depend on the tokens before it and on nothing else, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moot.core.errors import ConfigError
from moot.model.backend import plain_runner
from moot.model.checks import selfcheck
from moot.model.decoder.kernels.library import VARIANTS
from moot.model.inputs import SequenceInput
from moot.model.loading.load import load_model
from moot.model.modules.tiled_layers import RowwiseActivation
from moot.model.rows import NATURAL, Padding
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import FAMILIES, make_tiny_model
from tests.model.driving import load_by_kernels, path_to, random_ids, rows_of, run_chunks, threads

DTYPES = ("float32", "bfloat16", "float64")
LENGTH = 526
"""Crosses a page border, with room for a tree of depth eight on either side of it."""


# A width that is no multiple of a vector's length, where activation functions have remainders.
SIZES: dict[str, dict[str, Any]] = {"llama": {"intermediate_size": 200}}
CASES = [(family, dtype, SIZES.get(family, {}), None) for family in FAMILIES for dtype in DTYPES]
KERNEL_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_attention_heads": 6, "hidden": 96, "head_dim": 64}),
    ("llama", {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 32}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 128}),
    ("mistral", {"sliding_window": 24, "head_dim": 32}),
    ("qwen2", {"hidden": 128}),
    ("qwen3", {"head_dim": 96}),
]
"""Models whose heads and widths are such that compiled kernels compute what lies between products."""

KERNEL_CASES = [(*config, variant.name) for variant in VARIANTS for config in KERNEL_CONFIGS]


@pytest.fixture(
    scope="module",
    params=[*CASES, *((family, "bfloat16", config, name) for family, config, name in KERNEL_CASES)],
    ids=[f"{case[0]}-{case[1]}" for case in CASES] + [f"{case[0]}-{case[2]}-{case[1]}" for case in KERNEL_CASES],
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    family, dtype, config, by = request.param
    path = make_tiny_model(tmp_path_factory.mktemp(family), family, seed=1, **config)
    # With several threads operations are cut at other places; one thread for the rest keeps the suite short.
    with threads(2 if family == "llama" else 1):
        yield plain_runner(load_by_kernels(path, by) if by else load_model(path, dtype=dtype), 16384, True)


@pytest.fixture(scope="module")
def whole(runner: ModelRunner) -> Tensor:
    """Logits of the text in one pass."""
    logits, cache = run_chunks(runner, random_ids(LENGTH), [])
    cache.free()
    return logits


@pytest.mark.parametrize("sizes", [[1, 2, 3, 4, 5], [31, 1, 33, 446], [500, *[1] * 26], [67] * 7])
def test_chunks_change_no_bit(runner: ModelRunner, whole: Tensor, sizes: list[int]) -> None:
    """cold = chunked = decoded token by token."""
    logits, cache = run_chunks(runner, random_ids(LENGTH), sizes)
    cache.free()
    assert torch.equal(logits, whole)


def test_batch_mates_change_no_bit(runner: ModelRunner, whole: Tensor) -> None:
    """Beside other requests of other lengths, in whatever order, a request's logits are those it has alone."""
    token_ids = random_ids(LENGTH)
    _, cache = run_chunks(runner, token_ids[:510], [300])
    mates = [run_chunks(runner, random_ids(length, seed=length), [])[1] for length in (3, 40, 600)]
    for size, place in ((1, 0), (5, 1), (10, 3)):
        inputs = [SequenceInput(mate, random_ids(4, seed=9), None, [3]) for mate in mates]
        own = token_ids[cache.length : cache.length + size]
        inputs.insert(place, SequenceInput(cache, own, None, range(size)))
        logits = runner.forward(inputs)[place]
        assert torch.equal(logits, whole[cache.length : cache.length + size])
        cache.commit(range(size))
    for kept in (cache, *mates):
        kept.free()


def test_warm_and_moved_caches_change_no_bit(runner: ModelRunner, whole: Tensor) -> None:
    """A prefix taken over as a block, and a text opened again with committed tokens elsewhere, give the same bits."""
    token_ids = random_ids(LENGTH)
    _, donor = run_chunks(runner, token_ids[:520], [77])
    warm = runner.new_cache()
    warm.append_block(donor.read_block(0, 512))
    assert torch.equal(rows_of(runner, warm, token_ids[512:]), whole[512:])
    moved = plain_runner(runner.loaded, 4096, True)
    assert moved.numerics_fingerprint == runner.numerics_fingerprint
    logits, _ = run_chunks(moved, token_ids, [515, 1, 1])
    assert torch.equal(logits, whole)
    donor.free()
    warm.free()


TREES = [
    [-1, 0, 1, 0, 3, 4, 0, -1, 7],
    [-1, 0, 0, 0, 0, 1, 2, 5],
    [-1, *range(8)],
    [-1, -1, -1],
    [-1, 0, 1, 1, 2, 3, 3, 6],
]


@pytest.mark.parametrize("base", [3, 507, 512])
def test_every_path_of_a_tree_is_a_chain(runner: ModelRunner, base: int) -> None:
    """Each node's logits, and those after committing its path, are bit by bit those of the path as a chain."""
    for parents in TREES:
        prefix, nodes, after = random_ids(base, seed=2), random_ids(len(parents), seed=base), random_ids(3, seed=8)
        alone, cache = run_chunks(runner, prefix, [])[1], run_chunks(runner, prefix, [])[1]
        tree = rows_of(runner, cache, nodes, parents)
        for node in range(len(nodes)):
            path = path_to(node, parents)
            chain = [nodes[index] for index in path]
            (logits,) = runner.forward([SequenceInput(alone, chain, None, [len(chain) - 1])])
            assert torch.equal(tree[node], logits[0])
        cache.commit(path)
        alone.commit(range(len(chain)))
        assert torch.equal(rows_of(runner, cache, after), rows_of(runner, alone, after))
        assert torch.equal(cache.read_block(0, cache.length), alone.read_block(0, alone.length))
        cache.free()
        alone.free()


class Sociable(nn.Module):
    """An activation function that lets the rows of a pass influence each other in the last bits."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.silu(input) * (1 + 1e-6 * input.mean())


def test_a_model_that_mixes_rows_is_refused(tmp_path: Path) -> None:
    """What no padding can mend is found at start, and the mode is refused."""
    loaded = load_model(make_tiny_model(tmp_path), dtype="float32")
    for module in loaded.model.modules():
        if isinstance(module, RowwiseActivation):
            module.activation = Sociable()
    with pytest.raises(ConfigError, match="batch-invariant mode does not hold"):
        plain_runner(loaded, 1024, True)
    assert not plain_runner(loaded, 1024, False).batch_invariant


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_finds_row_counts_that_differ(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that rounds single rows in another order, as BLAS libraries do, is seen through any rounding."""
    plain_linear = nn.functional.linear

    def two_kernels(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if input.shape[-2] >= 8:
            return plain_linear(input, weight, bias)
        half = weight.shape[1] // 2
        wide = [
            tensor.double() for tensor in (input[..., :half], weight[:, :half], input[..., half:], weight[:, half:])
        ]
        parts = [plain_linear(*wide[:2]).float(), plain_linear(*wide[2:]).float()]
        return (parts[0] + parts[1]).to(input.dtype)

    loaded = load_model(make_tiny_model(tmp_path), dtype=dtype, lean=False)
    monkeypatch.setattr(nn.functional, "linear", two_kernels)
    rules = selfcheck.find_rules(loaded)
    assert rules.linear.minimum >= 8
    assert rules.linear in (Padding(16, 16), Padding(32, 32))


def test_fingerprint_names_what_rounds_otherwise(tmp_path: Path) -> None:
    """Another dtype, mode or number of threads is another fingerprint; the same is the same."""
    path = make_tiny_model(tmp_path)
    single, half = load_model(path, dtype="float32"), load_model(path, dtype="bfloat16")
    seen = {plain_runner(loaded, 512, mode).numerics_fingerprint for loaded in (single, half) for mode in (True, False)}
    assert len(seen) == 4
    assert plain_runner(single, 512, True).numerics_fingerprint in seen
    with threads(torch.get_num_threads() + 1):
        assert plain_runner(single, 512, True).numerics_fingerprint not in seen


def test_padding_counts() -> None:
    """Rows are padded to at least the minimum and to a multiple, never by more than needed."""
    assert [Padding(4, 1).rows(count) for count in (1, 4, 5, 32)] == [4, 4, 5, 32]
    assert [Padding(16, 16).rows(count) for count in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert NATURAL.linear.rows(1) == 1
