"""Prompt KV shared between requests: whole blocks, found by a chained hash, bounded in tokens, least recent out first.

A block's key is a hash over the salt and all token ids from the beginning of the prompt to the block's end, so equal
keys mean equal prefixes. Only prompt tokens enter: a rejected draft token can never be in a shared block. Blocks are
copies; a hit copies them into the session's own cache, and eviction harms no session. `PrefixSharing` moves prompt
blocks between a session's own cache and the prefix cache.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from torch import Tensor

from moot.runtime.faults import fault
from services.verifier.sessions import Session

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
    """Shared blocks of prompt KV. Not thread-safe: the compute thread owns it. `capacity_tokens` below one block:
    nothing is kept."""

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
        """Blocks of the longest cached prefix of `hashes`. The blocks become the most recent ones, the first the very
        most: a block without those before it is of no use, so the later ones go first.
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


class PrefixSharing:
    """Prompt blocks between sessions and the prefix cache. Not thread-safe: the compute thread owns it."""

    def __init__(self, capacity_tokens: int, block_tokens: int) -> None:
        self.cache: PrefixCache[Tensor] = PrefixCache(capacity_tokens, block_tokens)

    def fill(self, session: Session) -> int:
        """Copy what is known of the prompt into the empty cache of `session`; returns the number of tokens.

        At least one token of the prefix stays missing, because the next token's logits come from feeding it.
        """
        if not self.cache.is_enabled:
            return 0
        if not session.block_hashes:
            prompt = session.token_ids[: session.num_prompt_tokens]
            session.block_hashes = block_hashes(prompt, self.cache.block_tokens, session.cache_salt)
        usable = (session.length - 1) // self.cache.block_tokens
        if found := self.cache.find(session.block_hashes[:usable]):
            # Once for the whole prefix: growing block by block copies what is there each time.
            session.cache.reserve(session.length)
        for block in found:
            session.cache.append_block(block)
        session.cached_length = session.cache.length
        return session.cached_length

    def keep(self, session: Session) -> None:
        """Share the whole blocks of the prompt that `session` holds by now and no session has shared yet."""
        end = min(len(session.block_hashes), session.cached_length // self.cache.block_tokens)
        start = session.num_shared_blocks
        while start < end and session.block_hashes[start] in self.cache:
            start += 1
        if start < end:
            if (found := fault("verifier.share")) and found.action == "memory":
                raise MemoryError("fault point verifier.share")
            size = self.cache.block_tokens
            blocks = [session.cache.read_block(index * size, (index + 1) * size) for index in range(start, end)]
            self.cache.insert(session.block_hashes[:end], blocks)
        session.num_shared_blocks = max(session.num_shared_blocks, end)

    def leave(self, session: Session) -> None:
        """Leave unshared what `session` holds by now and has not shared yet."""
        session.num_shared_blocks = len(session.block_hashes)

    def give_up(self) -> bool:
        """Let go of all blocks: they only save time, and a pass has no memory. False: there were none."""
        had_some = len(self.cache) > 0
        self.cache.clear()
        return had_some
