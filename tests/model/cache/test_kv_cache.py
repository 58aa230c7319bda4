"""The cache of one sequence and the accounting of all."""

from __future__ import annotations

import errno
import math
import mmap
from pathlib import Path

import pytest
import torch

from moot.core.errors import NoCapacity, is_out_of_memory
from moot.model.cache.contiguous import PAGE_SLOTS, SPAN_SLOTS, KvPool, KvShape, SequenceCache
from moot.model.cache.kv_cache import Pending

SHAPE = KvShape(2, 1, 4, torch.float32, torch.device("cpu"))


def filled(pool: KvPool, count: int) -> SequenceCache:
    """A cache of `count` committed tokens whose numbers are their positions."""
    cache = SequenceCache(pool)
    cache.append_block(torch.arange(count).float()[None, None, :, None, None].expand(2, 2, count, 1, 4))
    return cache


def positions(cache: SequenceCache) -> list[int]:
    return cache.read_block(0, cache.length)[0, 0, :, 0, 0].int().tolist()


def test_slots_are_charged_by_the_page_and_given_back() -> None:
    """What all caches hold never exceeds the capacity, and is nothing after free."""
    pool = KvPool(SHAPE, 3 * PAGE_SLOTS)
    first, second = filled(pool, 1), filled(pool, PAGE_SLOTS + 1)
    assert (pool.used_tokens, pool.free_tokens) == (3 * PAGE_SLOTS, 0)
    with pytest.raises(NoCapacity):
        first.reserve(PAGE_SLOTS + 1)
    assert (first.length, first.num_slots) == (1, PAGE_SLOTS)
    second.free()
    first.reserve(PAGE_SLOTS + 1)
    assert positions(first) == [0]
    first.free()
    first.free()
    assert pool.used_tokens == 0


def test_bytes_of_a_token() -> None:
    """Two layers, key and value, one head of four float32 numbers."""
    assert SHAPE.bytes_per_token == 2 * 2 * 4 * 4


def test_growing_keeps_what_is_committed() -> None:
    cache = filled(KvPool(SHAPE, 4 * PAGE_SLOTS), 500)
    cache.reserve(3 * PAGE_SLOTS)
    assert positions(cache) == list(range(500))


def test_a_cache_takes_the_memory_that_is_written_to_and_gives_all_back() -> None:
    """Slots are zeros from the start and none of the machine's memory; what was taken is the system's again after the
    cache's end."""

    def taken() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    pool = KvPool(KvShape(8, 8, 64, torch.float32, torch.device("cpu")), 16 * PAGE_SLOTS)
    size = 8 * PAGE_SLOTS * pool.shape.bytes_per_token
    before = taken()
    cache = SequenceCache(pool)
    cache.reserve(8 * PAGE_SLOTS)
    assert taken() - before < size // 8
    assert not cache.data[:, :, ::500].any()
    with torch.inference_mode():
        cache.data.fill_(math.nan)
    assert taken() - before > size * 7 // 8
    cache.free()
    assert taken() - before < size // 8


def test_slots_that_could_not_be_allocated_are_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for it the cache does not grow, and its pool can still give what it had."""
    pool = KvPool(SHAPE, 4 * PAGE_SLOTS)
    cache = SequenceCache(pool)
    cache.reserve(1)

    def fail(*args: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", fail)
        with pytest.raises(OSError, match="allocate memory") as raised:
            cache.reserve(PAGE_SLOTS + 1)
    assert is_out_of_memory(raised.value)
    assert (cache.num_slots, pool.used_tokens) == (PAGE_SLOTS, PAGE_SLOTS)
    cache.reserve(4 * PAGE_SLOTS)
    cache.free()
    assert pool.used_tokens == 0


def test_crop_forgets_and_gives_pages_back() -> None:
    """Cropping keeps at most one page more than needed, and the prefix as it was."""
    pool = KvPool(SHAPE, 8 * PAGE_SLOTS)
    cache = filled(pool, 4 * PAGE_SLOTS)
    cache.crop(10)
    assert positions(cache) == list(range(10))
    assert pool.used_tokens == cache.num_slots == 2 * PAGE_SLOTS
    for length in (11, -1):
        with pytest.raises(ValueError, match="cannot crop"):
            cache.crop(length)


def test_committing_a_path_compacts_it() -> None:
    """Of a tree, the kept nodes land side by side after the committed slots; the others leave nothing."""
    cache = filled(KvPool(SHAPE, PAGE_SLOTS), 3)
    tree_kv = torch.arange(100, 105).float()[None, None, :, None, None].expand(2, 2, 5, 1, 4)
    cache.pending = Pending((-1, 0, 0, 2, 1), tree_kv)
    cache.commit([0, 2, 3])
    assert positions(cache) == [0, 1, 2, 100, 102, 103]
    assert cache.pending is None


@pytest.mark.parametrize("kept", [[1], [0, 3], [0, 1, 2], [0, 0], [5], [-1]])
def test_only_paths_can_be_committed(kept: list[int]) -> None:
    """Tokens that are no path from the root would leave a cache of no text: refused, nothing changed."""
    cache = filled(KvPool(SHAPE, PAGE_SLOTS), 3)
    cache.pending = Pending((-1, 0, 0, 2, 1), torch.zeros(2, 2, 5, 1, 4))
    with pytest.raises(ValueError, match="not a path"):
        cache.commit(kept)
    assert cache.length == 3
    with pytest.raises(ValueError, match="nothing is pending"):
        cache.commit([0])


def test_blocks_are_copies_of_committed_slots() -> None:
    """A block outlives its donor and never shows pending slots."""
    pool = KvPool(SHAPE, 4 * PAGE_SLOTS)
    donor = filled(pool, 600)
    block = donor.read_block(100, 600)
    with pytest.raises(ValueError, match="not committed"):
        donor.read_block(0, 601)
    donor.free()
    taker = filled(pool, 100)
    taker.append_block(block)
    assert positions(taker) == list(range(600))


def test_short_texts_hold_half_a_page_and_are_charged_a_whole_one() -> None:
    """Memory grows by spans, the pool's account by pages: an account never says less than what is held."""
    pool = KvPool(SHAPE, 2 * PAGE_SLOTS)
    cache = filled(pool, SPAN_SLOTS)
    assert (cache.data.shape[2], cache.num_slots, pool.used_tokens) == (SPAN_SLOTS, PAGE_SLOTS, PAGE_SLOTS)
    cache.reserve(SPAN_SLOTS + 1)
    assert (cache.data.shape[2], pool.used_tokens) == (PAGE_SLOTS, PAGE_SLOTS)
    assert positions(cache) == list(range(SPAN_SLOTS))
    cache.reserve(PAGE_SLOTS + 1)
    assert (cache.data.shape[2], pool.used_tokens) == (PAGE_SLOTS + SPAN_SLOTS, 2 * PAGE_SLOTS)
    cache.free()
    assert pool.used_tokens == 0
