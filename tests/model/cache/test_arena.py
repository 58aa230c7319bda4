"""Caches that lie side by side in an arena hold what caches with memory of their own hold, and leave nothing behind."""

from __future__ import annotations

import random

import pytest
import torch

from moot.core.errors import NoCapacity
from moot.core.types import ROOT
from moot.model.cache.base import Pending
from moot.model.cache.contiguous import (
    MOST_SLAB_SLOTS,
    PAGE_SLOTS,
    SPAN_SLOTS,
    Arena,
    Chunk,
    KvPool,
    KvShape,
    SequenceCache,
    slabs_per_chunk,
)

SHAPES = {
    "whole pages of memory": KvShape(3, 2, 16, torch.bfloat16, torch.device("cpu")),
    "parts of pages": KvShape(2, 1, 4, torch.bfloat16, torch.device("cpu")),
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> KvShape:
    found = request.param
    assert isinstance(found, KvShape)
    return found


def arena_of(pool: KvPool) -> Arena:
    assert pool.arena is not None
    return pool.arena


def test_a_slab_is_zeros_whatever_it_held(shape: KvShape) -> None:
    """A masked slot has weight 0, and 0 times a former request's NaN would be NaN: a slab starts as zeros each time."""
    arena = Arena(shape)
    first, second = arena.take(SPAN_SLOTS), arena.take(SPAN_SLOTS)
    assert first is not None
    assert second is not None
    for slab in (first, second):
        assert not slab.data.any()
        slab.data.fill_(float("nan"))
    arena.give_back(first)
    again = arena.take(SPAN_SLOTS)
    assert again is not None
    assert (again.chunk, again.index) == (first.chunk, first.index)
    assert torch.equal(again.data, torch.zeros_like(again.data))
    assert second.data.isnan().all()


def test_first_slabs_first_and_unused_chunks_last_no_longer(shape: KvShape) -> None:
    """Slabs are handed out from the start, so that they are neighbours; a chunk without a user is given back."""
    arena = Arena(shape)
    slots = 4 * SPAN_SLOTS
    slabs = [arena.take(slots) for _ in range(slabs_per_chunk(slots) + 2)]
    places = [(slab.chunk, slab.index) for slab in slabs if slab is not None]
    assert [index for _, index in places] == [*range(slabs_per_chunk(slots)), 0, 1]
    assert arena.num_chunks == 2
    for place in (5, 3, -1, -2):
        slab = slabs[place]
        assert slab is not None
        arena.give_back(slab)
    assert arena.num_chunks == 1
    taken = [arena.take(slots) for _ in range(2)]
    assert [(slab.chunk, slab.index) for slab in taken if slab is not None] == [places[3], places[5]]
    for slab in [*slabs[:3], slabs[4], *slabs[6:-2], *taken]:
        assert slab is not None
        arena.give_back(slab)
    assert arena.num_chunks == 0


def test_long_caches_have_memory_of_their_own(shape: KvShape) -> None:
    """Past the largest slab a cache moves out of the arena, with its content, and cropped it moves in again."""
    pool = KvPool(shape, 4 * MOST_SLAB_SLOTS, Arena(shape))
    cache = SequenceCache(pool)
    block = torch.randn(shape.num_layers, 2, MOST_SLAB_SLOTS, shape.num_kv_heads, shape.head_dim).bfloat16()
    cache.append_block(block)
    assert cache.slab is not None
    cache.reserve(MOST_SLAB_SLOTS + 1)
    assert (cache.slab, arena_of(pool).num_chunks) == (None, 0)
    assert torch.equal(cache.read_block(0, MOST_SLAB_SLOTS), block)
    cache.crop(10)
    assert cache.slab is not None
    assert torch.equal(cache.read_block(0, 10), block[:, :, :10])
    assert not cache.data[:, :, 10:].any()
    cache.free()
    assert (cache.slab, arena_of(pool).num_chunks, pool.used_tokens) == (None, 0, 0)


def test_without_address_space_caches_have_memory_of_their_own(shape: KvShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk is much more than one cache; where the system refuses it, the cache itself may still find room."""

    def refuse(self: Chunk, shape: KvShape, slots: int) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(Chunk, "__init__", refuse)
    cache = SequenceCache(KvPool(shape, PAGE_SLOTS, Arena(shape)))
    cache.reserve(3)
    assert (cache.slab, cache.data.shape[2]) == (None, SPAN_SLOTS)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_operations_give_the_same_caches(shape: KvShape, seed: int) -> None:
    """Random growth, commits of chains and trees, crops, wipes and ends: content and accounts as without an arena."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pools = KvPool(shape, 8 * PAGE_SLOTS, Arena(shape)), KvPool(shape, 8 * PAGE_SLOTS)
    pairs = [tuple(SequenceCache(pool) for pool in pools) for _ in range(12)]
    refused = 0

    def numbers(count: int) -> torch.Tensor:
        sizes = (shape.num_layers, 2, count, shape.num_kv_heads, shape.head_dim)
        return torch.randn(sizes, generator=generator).bfloat16()

    for _ in range(150):
        pair = draw.choice(pairs)
        length, what = pair[0].length, draw.randrange(6)
        count, block = draw.randrange(1, 300), numbers(300)
        outcomes = []
        for cache in pair:
            try:
                if what <= 1:
                    cache.append_block(block[:, :, :count])
                elif what == 2:
                    cache.reserve(length + 8)
                    cache.pending = Pending((ROOT, 0, 0, 2), block[:, :, :4])
                    cache.commit([0, 2, 3])
                elif what == 3:
                    cache.crop(min(length, count))
                elif what == 4:
                    with torch.inference_mode():
                        cache.data[:, :, length:] = float("nan")
                    cache.wipe()
                else:
                    cache.free()
                outcomes.append("done")
            except NoCapacity:
                outcomes.append("full")
        assert outcomes[0] == outcomes[1]
        refused += outcomes[0] == "full"
        assert pools[0].used_tokens == pools[1].used_tokens
        for one, other in pairs:
            assert (one.length, one.num_slots) == (other.length, other.num_slots)
            assert torch.equal(one.data, other.data)
    assert refused
    for one, other in pairs:
        one.free()
        other.free()
    assert (pools[0].used_tokens, arena_of(pools[0]).num_chunks) == (0, 0)
