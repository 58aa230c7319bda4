"""The proposals of one round, merged into a trie.

Node 0 is the committed prefix. A node is a token given all tokens before it, so whatever is counted at a node is
counted for the same prefix: votes on a position never mix texts.
"""

from __future__ import annotations

from collections.abc import Sequence

from moot.core.types import Proposal

PREFIX = 0
"""The node of the committed prefix."""


class Ballot:
    """Trie of proposals. Lists are indexed by node; `depths[node]` is 0 for a first draft token.

    `voters[node]`: (index into drafter_ids, confidence byte) of every drafter whose proposal passes through the node,
    each drafter once, with its greatest confidence. `children[node]`: token id to node.
    """

    __slots__ = ("children", "depths", "drafter_ids", "parents", "proposals", "token_ids", "voters")

    def __init__(self, proposals: Sequence[Proposal], max_depth: int | None = None) -> None:
        # The order of arrival must not change the outcome; a drafter's own order (best first) stays.
        self.proposals = sorted((proposal for proposal in proposals if proposal.token_ids), key=_drafter_id)
        self.drafter_ids: list[str] = []
        self.token_ids = [-1]
        self.parents = [-1]
        self.depths = [-1]
        self.children: list[dict[int, int]] = [{}]
        self.voters: list[list[tuple[int, int]]] = [[]]
        for proposal in self.proposals:
            if not self.drafter_ids or self.drafter_ids[-1] != proposal.drafter_id:
                self.drafter_ids.append(proposal.drafter_id)
            self._add(proposal, len(self.drafter_ids) - 1, max_depth)

    def __len__(self) -> int:
        """Nodes, the prefix not counted."""
        return len(self.token_ids) - 1

    def _add(self, proposal: Proposal, drafter: int, max_depth: int | None) -> None:
        children, voters = self.children, self.voters
        confidences = proposal.confidences or (0,) * len(proposal.token_ids)
        node = PREFIX
        for depth, (token, confidence) in enumerate(zip(proposal.token_ids[:max_depth], confidences, strict=False)):
            child = children[node].get(token)
            if child is None:
                child = len(voters)
                children[node][token] = child
                self.token_ids.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                children.append({})
                voters.append([(drafter, confidence)])
            elif voters[child][-1][0] != drafter:
                voters[child].append((drafter, confidence))
            elif voters[child][-1][1] < confidence:
                voters[child][-1] = (drafter, confidence)
            node = child

    def follow(self, token_ids: Sequence[int]) -> list[int]:
        """Nodes of the longest head of `token_ids` that is in the trie."""
        nodes: list[int] = []
        node = PREFIX
        for token in token_ids:
            child = self.children[node].get(token)
            if child is None:
                break
            nodes.append(child)
            node = child
        return nodes


def _drafter_id(proposal: Proposal) -> str:
    return proposal.drafter_id
