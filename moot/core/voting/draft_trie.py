"""The draft trie: the proposals of one round, merged; and which of its nodes are worth verifying.

Node 0 is the committed prefix. A node is a token given all tokens before it, so whatever is counted at a node is
counted for the same prefix: votes on a position never mix texts.

Shapes: `chain` (the voted path), `siblings` (the path and the losing children next to it), `tree` (the best nodes of
the whole trie; SpecInfer 2305.09781, EAGLE-2 2406.16858). Nodes come in the order of their estimated probability of
being reached and accepted, so every head of the order is a well-formed draft and a budget is spent by cutting it.

`Budget`: one budget of draft nodes for each verifier, spent on the best nodes of all requests that share its steps.
Requests decide one after the other and wait for none. Each leaves here what its latest nodes promise, in seconds; the
best of all, as many as pay for a slower step, go into a batch, and the least of them is the price of a node. A request
sends its nodes that are worth the price: what others offered last stands for what they will offer to this step. The
price rises with the load, and at saturation no node is worth it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from math import inf, nextafter
from typing import Protocol

from moot.core.types import Draft, Proposal

PREFIX = 0
"""The node of the committed prefix."""


class DraftTrie:
    """Trie of proposals. Lists are indexed by node; `depths[node]` is 0 for a first draft token.

    `drafters[node]`: (index into drafter_ids, confidence byte, depth in the drafter's own proposal) of every drafter
    whose proposal passes through the node, each drafter once, with its greatest confidence. `children[node]`: token id
    to node.
    """

    __slots__ = ("children", "depths", "drafter_ids", "drafters", "parents", "proposals", "token_ids")

    def __init__(self, proposals: Sequence[Proposal], max_depth: int | None = None) -> None:
        # The order of arrival must not change the outcome; a drafter's own order (best first) stays.
        self.proposals = sorted((proposal for proposal in proposals if proposal.token_ids), key=_drafter_id)
        self.drafter_ids: list[str] = []
        self.token_ids = [-1]
        self.parents = [-1]
        self.depths = [-1]
        self.children: list[dict[int, int]] = [{}]
        self.drafters: list[list[tuple[int, int, int]]] = [[]]
        for proposal in self.proposals:
            if not self.drafter_ids or self.drafter_ids[-1] != proposal.drafter_id:
                self.drafter_ids.append(proposal.drafter_id)
            self._add(proposal, len(self.drafter_ids) - 1, max_depth)

    def __len__(self) -> int:
        """Number of nodes, the prefix not counted."""
        return len(self.token_ids) - 1

    def _add(self, proposal: Proposal, drafter: int, max_depth: int | None) -> None:
        children, drafters, offset = self.children, self.drafters, proposal.offset
        confidences = proposal.confidences or (0,) * len(proposal.token_ids)
        node = PREFIX
        for depth, (token, confidence) in enumerate(zip(proposal.token_ids[:max_depth], confidences, strict=False)):
            child = children[node].get(token)
            if child is None:
                child = len(drafters)
                children[node][token] = child
                self.token_ids.append(token)
                self.parents.append(node)
                self.depths.append(depth)
                children.append({})
                drafters.append([(drafter, confidence, offset + depth)])
            elif drafters[child][-1][0] != drafter:
                drafters[child].append((drafter, confidence, offset + depth))
            elif drafters[child][-1][1] < confidence:
                drafters[child][-1] = (drafter, confidence, offset + depth)
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


class ShareOf(Protocol):
    def of(self, node: int) -> Sequence[tuple[int, float]]:
        """The children of `node` with their shares of the vote in [0, 1], best first."""
        ...


class Acceptance(Protocol):
    def rate(self, share: float, depth: int) -> float:
        """Probability in [0, 1] that a node with this vote share is accepted, given that its parent is."""
        ...


Shape = Callable[[DraftTrie, ShareOf, Sequence[int], int, Acceptance | None], tuple[list[int], list[float]]]
"""(draft trie, shares, voted path, most nodes, learned acceptance) to nodes, parents first, and their probabilities of
being accepted, never rising. Without a learned acceptance the share itself is taken."""


def chain(
    trie: DraftTrie, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
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
    trie: DraftTrie, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
) -> tuple[list[int], list[float]]:
    """The voted path and the children that lost to it; nothing below a child that lost."""
    return _best_first(shares, limit, acceptance, frozenset(path))


def tree(
    trie: DraftTrie, shares: ShareOf, path: Sequence[int], limit: int, acceptance: Acceptance | None
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


def to_draft(trie: DraftTrie, nodes: Sequence[int]) -> Draft:
    """Nodes of the trie, parents first, as what is sent to verify."""
    index_of = {node: index for index, node in enumerate(nodes)}
    index_of[PREFIX] = -1
    return Draft(
        tuple([trie.token_ids[node] for node in nodes]),
        tuple([index_of[trie.parents[node]] for node in nodes]),
    )


_LOOKS = 8
"""So many times the price is worked out anew while every request takes one turn."""


class Budget:
    """The budget of draft nodes of one verifier. `seconds(n)`: expected duration of a step with n tokens, never
    falling."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self._seconds = seconds
        # Request to what its nodes are worth, negated, best first; and all of them in order.
        self._offers: dict[object, list[float]] = {}
        self._all: list[float] = []
        self._num_new = 0
        self.price = 0.0
        """Seconds that a node must promise to be sent."""

    def __len__(self) -> int:
        """Number of requests that share the budget."""
        return len(self._offers)

    def spend(self, request: object, values: Sequence[float], num_requests: float) -> int:
        """How many of its leading nodes `request` sends. Replaces what it offered before.

        `values`: seconds of one request that each node is expected to save, never rising; infinite: it is sent in any
        case. `num_requests` >= 1: in one step of the verifier, those of other routers included.
        """
        self._withdraw(request)
        offer = self._offers[request] = [-value for value in values]
        for negated in offer:
            insort(self._all, negated)
        self._num_new += 1
        if self._num_new * _LOOKS >= len(self._offers):
            self._num_new = 0
            self.price = self._priced(num_requests)
        count = 0
        while count < len(offer) and -offer[count] >= self.price:
            count += 1
        return count

    def leave(self, request: object) -> None:
        """The request has ended, or goes to another verifier."""
        self._withdraw(request)
        self._offers.pop(request, None)

    def _withdraw(self, request: object) -> None:
        for negated in self._offers.get(request, ()):
            del self._all[bisect_left(self._all, negated)]

    def _priced(self, num_requests: float) -> float:
        # Those known here stand for all of a step: others' routers see requests of the same kinds.
        known, per_request = len(self._offers), num_requests / len(self._offers)

        def cost(num_nodes: int) -> float:
            # A slower step is paid by each of its requests.
            return known * self._seconds(round(num_requests + num_nodes * per_request))

        values = [-negated for negated in self._all]
        fixed = bisect_left(self._all, nextafter(-inf, 0.0))
        count = fixed + worth(values[fixed:], 1.0, lambda num_nodes: cost(fixed + num_nodes))
        if count == len(values):
            return values[-1] if count > fixed else 0.0
        if count > fixed and values[count - 1] > values[count]:
            return values[count - 1]
        # No request sends nodes that are only as good as those that do not fit.
        return nextafter(values[count], inf)
