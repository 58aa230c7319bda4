"""Compiled kernels: their numbers are the right ones, no row's depend on another's, and what happens without them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moot.model.cache.contiguous import KvPool, KvShape, SequenceCache
from moot.model.cache.kv_cache import depths_of
from moot.model.checks.rowcases import Case, cancelling
from moot.model.decoder import build
from moot.model.decoder.by_kernels import StepPlan
from moot.model.decoder.kernels import library
from moot.model.decoder.kernels.kernel_products import KernelProduct
from moot.model.decoder.kernels.library import VARIANTS, CAttention, CNorm, Kernels, Variant, load_kernels
from moot.model.decoder.layers import HeadShape
from moot.model.layout import Segment, Step, plan_segment
from moot.model.loading.load import load_model
from moot.model.rows import NATURAL_KERNELS, TILE_ROWS, Padding, cpu_flags
from moot.shipped import cache_dir
from moot.testing.tiny_model import make_tiny_model
from tests.model.driving import path_to, threads

pytestmark = pytest.mark.usefixtures("inference")

HEADS = HeadShape(query_heads=6, kv_heads=2, dim=64)
WIDTH = (HEADS.query_heads + 2 * HEADS.kv_heads) * HEADS.dim
"""Of a row of queries, keys and values."""


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    variant: Variant = request.param
    if not variant.cpu_flags <= cpu_flags():
        pytest.skip(f"no kernels: a CPU with {variant.name}")
    built = library.find_or_build(cache_dir(), variant)
    if built is None:
        pytest.skip("no kernels: apt-get install gcc libc6-dev")
    return Kernels(built, variant)


def made(*sizes: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def test_norms_are_right(kernels: Kernels) -> None:
    """Within a rounding of bfloat16 of float64, over rows of sizes from 1e-3 to 1e3; the sum is stored as rounded."""
    sizes = torch.logspace(-3, 3, 70)[:, None]
    hidden, delta = made(70, 96, seed=1) * sizes, made(70, 96, seed=2) * sizes
    scale, out = torch.rand(96) + 0.5, torch.empty(70, 96, dtype=torch.bfloat16)
    by = CNorm(scale.data_ptr(), 1e-5)
    summed = hidden + delta
    exact = summed.double()
    expected = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * scale.double()
    for addend in (delta, None):
        kernels.norm(by, hidden, addend, out)
        assert torch.equal(hidden, summed)
        assert torch.allclose(out.double(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("outputs", [32, 45, 64, 16, 1000])
@pytest.mark.parametrize("biased", [True, False])
def test_products_are_right(kernels: Kernels, outputs: int, biased: bool) -> None:
    """Within a rounding of float64 for any number of outputs; a row's bits are the same among any number of rows."""
    x, weight = made(40, 96, seed=1), made(outputs, 96, seed=2)
    bias = made(outputs, seed=3) if biased else None
    product, single = KernelProduct(kernels, weight, bias), KernelProduct(kernels, weight, bias, single=True)
    whole = product(x)
    assert torch.equal(single(x).bfloat16(), whole)
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    size = x.double().norm(dim=1, keepdim=True) * weight.double().norm(dim=1)
    assert ((whole.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()
    assert ((single(x).double() - expected).abs() <= 1e-5 * size).all()
    for count in range(1, 40):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[-count:]), whole[-count:])


def test_gated_products_are_right(kernels: Kernels) -> None:
    """silu(gate) times the rest within a rounding of float64, for gates from -120 to 120."""
    gate, up = torch.linspace(-120, 120, 96).bfloat16()[:, None], made(96, 1, seed=4)
    weight = torch.cat((gate, up)).repeat(1, 2) * torch.tensor([1.0, 0.0])
    product = KernelProduct(kernels, weight.bfloat16(), None, gated=True)
    x = torch.tensor([[1.0, 5.0], [-0.5, 7.0]]).bfloat16()
    gates, ups = x[:, :1].double() * gate.double().T, x[:, :1].double() * up.double().T
    assert torch.allclose(product(x).double(), gates * torch.sigmoid(gates) * ups, rtol=2**-7, atol=1e-35)


def test_a_products_sums_do_not_depend_on_rows_or_threads(kernels: Kernels) -> None:
    """Where every sum is nothing but the rounding of its parts, a row's bits are the same in any company."""
    rows, weight = cancelling((TILE_ROWS,), (200,), 576, torch.Generator().manual_seed(0))
    product = KernelProduct(kernels, weight.bfloat16(), None)
    seen = []
    for count in (1, 2, 3):
        with threads(count):
            assert Case(lambda index: product(rows.bfloat16()[index]), 256).holds(Padding(1, 1))
            seen.append(product(rows.bfloat16()))
    assert seen[0].abs().max() > 0
    assert all(torch.equal(each, seen[0]) for each in seen)


def filled_cache(pool: KvPool, length: int, seed: int) -> SequenceCache:
    cache = SequenceCache(pool)
    cache.reserve(length + 40)
    cache.data[:, :, :length] = made(1, 2, length, HEADS.kv_heads, HEADS.dim, seed=seed)
    cache.length = length
    return cache


def pool() -> KvPool:
    return KvPool(KvShape(1, HEADS.kv_heads, HEADS.dim, torch.bfloat16, torch.device("cpu")), 65536)


def planned(cache: SequenceCache, start: int, parents: list[int]) -> Segment:
    return plan_segment(cache, start, parents, depths_of(parents), NATURAL_KERNELS)


def attended(kernels: Kernels, segments: list[Segment], projected: Tensor, window: int | None = None) -> Tensor:
    """Of rows that are not turned: [rows, query heads, dim]."""
    rows = len(projected)
    turns = torch.tensor([1.0, 0.0]).repeat(rows, HEADS.dim // 2).contiguous()
    plan = StepPlan(Step(segments, lambda: None), rows, turns, HEADS)
    kernels.attend(plan.c_plan, CAttention(None, 0.0, 1.0, window or 0), 0, projected)
    return plan.mixed.view(rows, HEADS.query_heads, HEADS.dim).clone()


def reference(cache: SequenceCache, own: list[Tensor], query: Tensor, window: int | None) -> Tensor:
    """In float64, of one row: own [2, kv_heads, dim] of each node on its path. Returns [query heads, dim]."""
    keys, values = torch.cat((cache.data[0, :, : cache.length], torch.stack(own, 1)), 1).double()
    if window is not None:
        keys, values = keys[-window:], values[-window:]
    group = HEADS.query_heads // HEADS.kv_heads
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = torch.einsum("hd,shd->hs", query.double(), keys).softmax(1)
    return torch.einsum("hs,shd->hd", weights, values)


TREES = {"chain": [-1, 0, 1, 2, 3], "tree": [-1, 0, 0, 1, 2, 2, 5, -1], "row": [-1]}


@pytest.mark.parametrize("window", [None, 1, 16, 37])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 200, 255])
@pytest.mark.parametrize("shape", TREES)
def test_attention_is_right(kernels: Kernels, shape: str, length: int, window: int | None) -> None:
    """Each row sees the committed tokens and its own path, within `window`; keys and values are stored."""
    parents = TREES[shape]
    cache = filled_cache(pool(), length, seed=length)
    projected = made(len(parents), WIDTH, seed=3, scale=0.4)
    got = attended(kernels, [planned(cache, 0, parents)], projected, window)
    queries, keys, values = projected.view(len(parents), -1, HEADS.dim).split([6, 2, 2], 1)
    for node in range(len(parents)):
        path = path_to(node, parents)
        own = [torch.stack((keys[each], values[each])) for each in path]
        expected = reference(cache, own, queries[node], window)
        assert (got[node].double() - expected).norm() < 0.01 * expected.norm() + 1e-9
    cache.commit(path)
    assert torch.equal(cache.data[0, :, length : cache.length], torch.stack(own, 1))


def test_no_row_depends_on_its_company(kernels: Kernels) -> None:
    """Alone, in a chain, in a tree, beside other requests, with one thread or two: the same bits."""
    projected = made(9, WIDTH, seed=4, scale=3.0)
    found: dict[str, Tensor] = {}
    for count in (1, 2, 3):
        with threads(count):
            chain = filled_cache(pool(), 77, seed=5)
            found[f"chain, {count} threads"] = attended(kernels, [planned(chain, 0, [-1, 0, 1])], projected[:3])
            single, rows = filled_cache(pool(), 77, seed=5), []
            for row in range(3):
                rows.append(attended(kernels, [planned(single, 0, [-1])], projected[row : row + 1]))
                single.commit([0])
            found[f"one by one, {count} threads"] = torch.cat(rows)
            branched = torch.cat((projected[5:6], projected[:1], projected[6:7], projected[1:3], projected[7:8]))
            tree = filled_cache(pool(), 77, seed=5)
            got = attended(kernels, [planned(tree, 0, [-1, -1, 1, 1, 3, 0])], branched)
            found[f"tree, {count} threads"] = got[[1, 3, 4]]
            shared = pool()
            mates = [filled_cache(shared, length, seed=5 if length == 77 else length) for length in (30, 77, 500)]
            segments = [planned(mates[0], 0, [-1, 0, 1, 2]), planned(mates[1], 4, [-1, 0, 1])]
            segments.append(planned(mates[2], 7, [-1, -1]))
            beside = torch.cat((projected[5:9], projected[:3], projected[3:5]))
            found[f"batch, {count} threads"] = attended(kernels, segments, beside)[4:7]
    first = next(iter(found.values()))
    assert [name for name, rows in found.items() if not torch.equal(rows, first)] == []


def test_what_lies_behind_a_row_does_not_reach_it(kernels: Kernels) -> None:
    """Slots of rejected tokens hold anything, also what is no number: rows before them do not read it."""
    projected = made(2, WIDTH, seed=6)
    clean, dirty = filled_cache(pool(), 100, seed=7), filled_cache(pool(), 100, seed=7)
    dirty.data[:, :, 100:] = math.nan
    results = [attended(kernels, [planned(cache, 0, [-1, 0])], projected) for cache in (clean, dirty)]
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_without_a_compiler_torch_computes(
    tmp_path: Path, variant: Variant, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler, or one that fails: no kernels, one line in the log that says why, nothing left behind."""
    for compiler in ("no-such-compiler", "false"):
        monkeypatch.setenv("CC", compiler)
        with caplog.at_level(logging.WARNING):
            assert library.find_or_build(tmp_path / compiler, variant) is None
        assert "kernels are not compiled" in caplog.text
        assert list((tmp_path / compiler).rglob("*.so")) == []
        caplog.clear()


def test_kernels_are_compiled_once(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built is found again without a compiler, and may be read by others: an image runs as another user than
    the one who built it. Another source has another name."""
    variant = kernels.variant
    built = library.find_or_build(tmp_path, variant)
    assert built is not None
    assert built.stat().st_mode & 0o777 == 0o755
    monkeypatch.setenv("CC", "no-such-compiler")
    assert library.find_or_build(tmp_path, variant) == built
    for changed in ("kernels.c", f"{variant.name}.h"):
        folder = tmp_path / changed
        folder.mkdir()
        for name in ("kernels.c", f"{variant.name}.h"):
            text = (Path(library.__file__).parent / name).read_text()
            (folder / name).write_text(text + "\n" * (name == changed))
        monkeypatch.setattr(library, "SOURCE", folder / "kernels.c")
        assert library.find_or_build(tmp_path, variant) is None


def test_a_cpu_gets_the_fastest_kernels_that_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that lacks any one instruction of a variant, of those built too, gets the next one, or none; MOOT_KERNELS
    may ask for less than the CPU can run, and never for more."""
    monkeypatch.delenv("MOOT_KERNELS", raising=False)
    fast, slow = VARIANTS
    whole = fast.cpu_flags | slow.cpu_flags
    assert library.allowed_variant(whole) is fast
    for missing in fast.cpu_flags - slow.cpu_flags:
        assert library.allowed_variant(whole - {missing}) is slow
    for missing in slow.cpu_flags:
        assert library.allowed_variant(slow.cpu_flags - {missing}) is None
    monkeypatch.setenv("MOOT_KERNELS", "avx2")
    assert library.allowed_variant(whole) is slow
    monkeypatch.setenv("MOOT_KERNELS", "avx512")
    assert library.allowed_variant(slow.cpu_flags) is None


def test_another_cpu_never_loads_them(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that lie ready, as in an image, are left alone by a CPU that has none of their instructions."""
    assert library.find_or_build(tmp_path, kernels.variant) is not None
    monkeypatch.setattr(library, "cpu_flags", lambda: kernels.variant.cpu_flags)
    found = load_kernels(tmp_path)
    assert found is not None
    assert found.variant is kernels.variant
    monkeypatch.setattr(library, "cpu_flags", lambda: frozenset({"sse2"}))
    assert load_kernels(tmp_path) is None


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_a_cpu_must_have_what_the_compiler_may_use(variant: Variant) -> None:
    """No instruction set is given to the compiler that is not looked for before loading."""
    allowed = {flag.removeprefix("-m") for flag in variant.flags if flag.startswith("-m")}
    assert allowed == {name.replace("_", "") for name in variant.cpu_flags}


def test_kernels_need_no_packed_products(tmp_path: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where oneDNN has no bfloat16 the kernels still compute a model that suits them, and modules any other."""
    monkeypatch.setattr(build, "can_pack", lambda dtype, device: False)
    monkeypatch.setenv("MOOT_KERNELS", kernels.variant.name)
    suiting = load_model(make_tiny_model(tmp_path / "suiting", head_dim=32), "cpu", "bfloat16")
    assert suiting.decoder is not None
    assert suiting.decoder.way == f"decoder, kernels {kernels.variant}"
    other = load_model(make_tiny_model(tmp_path / "other", head_dim=24), "cpu", "bfloat16")
    assert other.decoder is None


def test_variants_have_numerics_of_their_own() -> None:
    """No fingerprint takes one variant's numbers for the other's."""
    assert len({variant.digest for variant in VARIANTS}) == len(VARIANTS)
