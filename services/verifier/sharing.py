"""Moves prompt blocks between a session's own cache and the prefix cache."""

from __future__ import annotations

from torch import Tensor

from moot.faults import fault
from services.verifier.prefix_cache import PrefixCache, block_hashes
from services.verifier.sessions import Session


class PrefixSharing:
    """Not thread-safe: the compute thread owns it."""

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
        """Share the whole blocks of the prompt that `session` holds by now and nobody has shared yet."""
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
        """What `session` holds by now and nobody has shared is not shared any more."""
        session.num_shared_blocks = len(session.block_hashes)

    def give_up(self) -> bool:
        """Let go of all blocks: they spare time, and somebody has no memory. False: there were none."""
        had_some = len(self.cache) > 0
        self.cache.clear()
        return had_some
