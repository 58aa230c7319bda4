"""The prefix cache's policy: what may be shared, what goes first, what is never there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.verifier.prefix_cache import PrefixCache, block_hashes

IDS = st.lists(st.integers(0, 3), max_size=40)


@given(IDS, IDS, st.sampled_from(["", "a"]), st.sampled_from(["", "a"]))
def test_equal_keys_mean_equal_salt_and_prefix(first: list[int], second: list[int], salt: str, other: str) -> None:
    """Two prompts share exactly their common whole blocks, and nothing across salts."""
    shared = 0
    for left, right in zip(block_hashes(first, 4, salt), block_hashes(second, 4, other), strict=False):
        shared += left == right
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    assert shared == (common // 4 if salt == other else 0)


def test_salt_is_not_confused_with_ids() -> None:
    """A salt that looks like another salt plus ids shares nothing with them."""
    assert block_hashes([0, 0], 2, "a\0") != block_hashes([0, 0], 2, "a")
    assert not set(block_hashes([0] * 8, 2, "")) & set(block_hashes([0] * 8, 4, ""))


def test_a_prefix_is_found_up_to_its_first_missing_block() -> None:
    """A later block without the earlier ones is of no use and never returned."""
    cache: PrefixCache[str] = PrefixCache(64, 4)
    keys = block_hashes(range(16), 4, "")
    cache.insert(keys[:2], ["a", "b"])
    cache.insert(keys, ["d"])
    assert cache.find(keys) == ["a", "b"]
    assert cache.find(block_hashes([9, *range(15)], 4, "")) == []


def test_the_bound_in_tokens_holds_and_the_tail_of_the_least_recent_prefix_goes_first() -> None:
    """LRU by prefix; within one prefix the last block goes before the first."""
    cache: PrefixCache[int] = PrefixCache(19, 4)  # four whole blocks
    old, new = block_hashes(range(12), 4, ""), block_hashes(range(50, 58), 4, "")
    cache.insert(old, [0, 1, 2])
    cache.insert(new, [10, 11])
    assert cache.num_tokens == 16
    assert cache.find(new) == [10, 11]
    assert cache.find(old) == [0, 1]


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    """The blocks that another prompt can use stay."""
    cache: PrefixCache[int] = PrefixCache(8, 4)
    keys = block_hashes(range(40), 4, "")
    for end in range(1, 11):
        cache.insert(keys[:end], [end])
    assert cache.find(keys) == [1, 2]


def test_capacity_zero_keeps_nothing() -> None:
    """Switched off means that no block is held."""
    cache: PrefixCache[int] = PrefixCache(0, 4)
    cache.insert(block_hashes(range(8), 4, ""), [0, 1])
    assert len(cache) == 0
    assert not cache.is_enabled
