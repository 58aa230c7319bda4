"""Which nodes of the trie are verified, and how many are worth their time.

Shapes: `chain` (the voted path), `siblings` (the path and the losing children next to it), `tree` (the best nodes of
the whole trie; SpecInfer 2305.09781, EAGLE-2 2406.16858). Nodes come in the order of their estimated probability of
being reached and accepted, so every head of the order is a well-formed draft and a budget is spent by cutting it.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from moot.core.ballot import PREFIX, Ballot
from moot.core.types import Draft


class ShareOf(Protocol):
    def of(self, node: int) -> Sequence[tuple[int, float]]:
        """The children of `node` with their shares of the vote in [0, 1], best first."""
        ...


class Acceptance(Protocol):
    def rate(self, share: float, depth: int) -> float:
        """Probability in [0, 1] that a node with this vote share is accepted, given that its parent is."""
        ...


Shape = Callable[[Ballot, ShareOf, Sequence[int], int, Acceptance | None], tuple[list[int], list[float]]]
"""(ballot, shares, voted path, most nodes, learned acceptance) to nodes, parents first, and their probabilities of
being accepted, never rising. Without a learned acceptance the share itself is taken."""


def chain(
    ballot: Ballot, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
) -> tuple[list[int], list[float]]:
    """The voted path."""
    nodes = list(path[:limit])
    probabilities: list[float] = []
    probability = 1.0
    node = PREFIX
    for depth, child in enumerate(nodes):
        share = next(share for candidate, share in shares.of(node) if candidate == child)
        probability *= share if acceptance is None else acceptance.rate(share, depth)
        probabilities.append(probability)
        node = child
    return nodes, probabilities


def siblings(
    ballot: Ballot, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
) -> tuple[list[int], list[float]]:
    """The voted path and the children that lost to it; nothing below a child that lost."""
    return _best_first(shares, limit, acceptance, frozenset(path))


def tree(
    ballot: Ballot, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
) -> tuple[list[int], list[float]]:
    """The most probable nodes of the trie."""
    return _best_first(shares, limit, acceptance, None)


SHAPES: dict[str, Shape] = {"chain": chain, "siblings": siblings, "tree": tree}


def _best_first(
    shares: ShareOf, limit: int, acceptance: Acceptance | None, expandable: frozenset[int] | None
) -> tuple[list[int], list[float]]:
    nodes: list[int] = []
    probabilities: list[float] = []
    # Entries: negated probability, depth, order of pushing (best sibling first), node.
    frontier: list[tuple[float, int, int, int]] = []
    order = 0
    node, probability, depth = PREFIX, 1.0, 0
    while True:
        if expandable is None or node == PREFIX or node in expandable:
            for child, share in shares.of(node):
                rate = share if acceptance is None else acceptance.rate(share, depth)
                heapq.heappush(frontier, (-probability * rate, depth, order, child))
                order += 1
        if not frontier or len(nodes) >= limit:
            return nodes, probabilities
        negated, depth, _, node = heapq.heappop(frontier)
        probability = -negated
        nodes.append(node)
        probabilities.append(probability)
        depth += 1


def worth(probabilities: Iterable[float], value: float, cost: Callable[[int], float]) -> int:
    """How many leading nodes to verify.

    `probabilities` never rise; `value` is the worth of one accepted token and `cost(n)` the cost of verifying n draft
    tokens, both in the same unit (seconds). Returns the n that maximises value * (sum of the first n) - cost(n): for
    a convex cost, the nodes whose probability times value exceeds their marginal cost; for one with steps, the same
    without being stopped by a single step that later nodes pay for.
    """
    best_count, gain = 0, 0.0
    best = -cost(0)
    for count, probability in enumerate(probabilities, 1):
        gain += probability * value
        net = gain - cost(count)
        if net > best:
            best_count, best = count, net
    return best_count


def to_draft(ballot: Ballot, nodes: Sequence[int]) -> Draft:
    """Nodes of the trie, parents first, as what is sent to verify."""
    index_of = {node: index for index, node in enumerate(nodes)}
    index_of[PREFIX] = -1
    return Draft(
        tuple([ballot.token_ids[node] for node in nodes]),
        tuple([index_of[ballot.parents[node]] for node in nodes]),
    )
