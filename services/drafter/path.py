"""What a drafter has ready after a session's prefix, and which of it was drafted ahead. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moot.proposers.base import Chain

NOTHING = Chain((), ())


@dataclass(frozen=True, slots=True)
class Settled:
    """Tokens drafted ahead whose fate is known. Used: proposed later on, or committed as guessed."""

    num_used: int = 0
    num_dropped: int = 0


@dataclass(slots=True)
class Path:
    """`chain`: what was drafted after the prefix and no commit has contradicted.

    Its first `num_claimed` tokens were drafted for an ask; the others ahead of one, and wait to be used or dropped.
    `goal`: the length to reach while nobody asks.
    """

    chain: Chain = NOTHING
    num_claimed: int = 0
    goal: int = 0

    def __len__(self) -> int:
        return len(self.chain.token_ids)

    @property
    def wants_more(self) -> bool:
        return len(self) < self.goal

    def claim(self, num_tokens: int) -> Settled:
        """An ask for so many tokens has come: those that are ready are its own from now on."""
        claimed = max(min(num_tokens, len(self)), self.num_claimed)
        settled = Settled(num_used=claimed - self.num_claimed)
        self.num_claimed = claimed
        return settled

    def follow(self, token_ids: Sequence[int]) -> Settled:
        """Ids were committed, whoever drafted them: go on with what lies behind them, if they lie on the path."""
        same = 0
        for mine, committed in zip(self.chain.token_ids, token_ids, strict=False):
            if mine != committed:
                break
            same += 1
        num_ahead = len(self) - self.num_claimed
        num_used = max(same - self.num_claimed, 0)
        if same < min(len(self), len(token_ids)):
            self.clear()
            return Settled(num_used, num_ahead - num_used)
        self.chain = Chain(self.chain.token_ids[same:], self.chain.confidences[same:])
        self.num_claimed = max(self.num_claimed - same, 0)
        self.goal = max(self.goal - len(token_ids), 0)
        return Settled(num_used)

    def grow(self, chain: Chain, *, is_ahead: bool) -> bool:
        """`chain` is the path made longer. False: it is no longer, so there is nothing more to be had here."""
        if len(chain.token_ids) <= len(self):
            return False
        if not is_ahead:
            self.num_claimed = len(chain.token_ids)
        self.chain = chain
        return True

    def head(self, num_tokens: int) -> Chain:
        return Chain(self.chain.token_ids[:num_tokens], self.chain.confidences[:num_tokens])

    def clear(self) -> Settled:
        """Forget it all: the session ends, or what is asked for now is something else."""
        settled = Settled(num_dropped=len(self) - self.num_claimed)
        self.chain, self.num_claimed, self.goal = NOTHING, 0, 0
        return settled
