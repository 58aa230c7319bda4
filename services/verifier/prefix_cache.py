"""Prompt KV shared between requests: whole blocks, found by a chained hash, bounded in tokens, least recent out first.

A block's key is a hash over the salt and all token ids from the beginning of the prompt to the block's end, so equal
keys mean equal prefixes. Only prompt tokens enter: a rejected draft token can never be in a shared block. Blocks are
copies; a hit copies them into the session's own cache, and eviction harms nobody.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

BlockT = TypeVar("BlockT")


def block_hashes(token_ids: Sequence[int], block_tokens: int, salt: str) -> list[bytes]:
    """One key per whole block of `token_ids`."""
    hashes = []
    # The salt's digest has one length, so no salt can pass for another salt and some ids.
    state = hashlib.sha256(hashlib.sha256(salt.encode()).digest() + block_tokens.to_bytes(8, "little"))
    for end in range(block_tokens, len(token_ids) + 1, block_tokens):
        # Eight bytes an id: no two lists of ids share a byte string.
        state.update(array("q", token_ids[end - block_tokens : end]).tobytes())
        hashes.append(state.digest())
    return hashes


class PrefixCache(Generic[BlockT]):
    """Not thread-safe: the compute thread owns it. `capacity_tokens` below one block: nothing is kept."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = capacity_tokens // block_tokens
        self._blocks: OrderedDict[bytes, BlockT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def num_tokens(self) -> int:
        return len(self._blocks) * self.block_tokens

    @property
    def is_enabled(self) -> bool:
        return self._max_blocks > 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def find(self, hashes: Sequence[bytes]) -> list[BlockT]:
        """Blocks of the longest cached prefix of `hashes`. They become the most recent ones, the first the very most:
        a block without those before it is of no use, so the later ones go first.
        """
        found = []
        for key in hashes:
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        self._touch(hashes[: len(found)])
        return found

    def insert(self, hashes: Sequence[bytes], blocks: Sequence[BlockT]) -> None:
        """Keep `blocks`, the last ones of the prefix `hashes`; the least recent blocks make room."""
        if not self._max_blocks:
            return
        self._blocks.update(zip(hashes[len(hashes) - len(blocks) :], blocks, strict=True))
        self._touch(hashes)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for key in reversed(hashes):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def clear(self) -> None:
        self._blocks.clear()
