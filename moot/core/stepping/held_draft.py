"""The draft that a verifier holds for a session: aligned to what is committed, and cut into the pieces of steps.

A draft says for which length it was made. Tokens committed since move its root; a draft that they leave is dropped. It
may be deeper than any step will use: each step verifies a piece of it, and the rest waits for the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.types import ROOT, Draft, Proposal


@dataclass(frozen=True, slots=True)
class HeldDraft:
    """A draft for the prefix of `base_length` tokens, best nodes first.

    `chances[i]`: estimated probability, from the root, that node i is reached and accepted; never rising.
    `proposals`: those behind it, for a vote together with others where the step is planned; empty: not known.
    """

    base_length: int
    draft: Draft
    chances: tuple[float, ...]
    proposals: tuple[Proposal, ...] = ()

    def after(self, token_ids: Sequence[int]) -> tuple[HeldDraft | None, int]:
        """What is left once these tokens were committed behind its base, and how many of them it had right.

        None: they left the draft, or reached its end.
        """
        if not token_ids:
            return self, 0
        num_right, root = self.draft.follow(token_ids)
        if num_right < len(token_ids):
            return None, num_right
        rest = self._below(root, token_ids)
        return (rest if rest.draft.token_ids else None), num_right

    def _below(self, root: int, token_ids: Sequence[int]) -> HeldDraft:
        draft, scale = self.draft, self.chances[root]
        index_of = {root: ROOT}
        ids: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        for node in range(root + 1, len(draft)):
            parent = index_of.get(draft.parents[node])
            if parent is not None:
                index_of[node] = len(ids)
                ids.append(draft.token_ids[node])
                parents.append(parent)
                chances.append(self.chances[node] / scale if scale > 0 else 0.0)
        left = tuple(rest for one in self.proposals if (rest := one.after(token_ids)) is not None)
        return HeldDraft(self.base_length + len(token_ids), Draft(tuple(ids), tuple(parents)), tuple(chances), left)

    def piece(self, num_tokens: int) -> Draft:
        """Its best `num_tokens` nodes, parents before their children."""
        draft = self.draft
        return draft if num_tokens >= len(draft) else Draft(draft.token_ids[:num_tokens], draft.parents[:num_tokens])
