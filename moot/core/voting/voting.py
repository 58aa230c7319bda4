"""The vote: from proposals and weights to one draft.

Minions (2402.15678) votes by weight, one number per drafter; `calibrated` by what each drafter's confidence was worth
so far. A drafter's vote counts at a node of the trie, that is on a token given its prefix. A drafter without a proposal
abstains: it is neither for nor against. Ties: the child proposed by the heaviest single drafter, then the lowest token
id. Whatever wins, the target decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from moot.core.errors import named
from moot.core.types import Draft, Proposal
from moot.core.voting.draft_trie import PREFIX, SHAPES, Acceptance, DraftTrie, to_draft

EMPTY, TOO_LONG, VOCABULARY, CONFIDENCES = "empty", "too_long", "vocabulary", "confidences"
INVALID_REASONS = (EMPTY, TOO_LONG, VOCABULARY, CONFIDENCES)
"""A closed set, fit for a label. A drafter that abstains by an empty proposal shows as `empty`."""


def validate_proposal(proposal: Proposal, vocab_size: int, max_tokens: int) -> str | None:
    """Why `proposal` has no vote, one of INVALID_REASONS, or None.

    `vocab_size` is the tokenizer's, `max_tokens` the K that was asked for.
    """
    if not proposal.token_ids:
        return EMPTY
    if len(proposal.token_ids) > max_tokens:
        return TOO_LONG
    if min(proposal.token_ids) < 0 or max(proposal.token_ids) >= vocab_size:
        return VOCABULARY
    confidences = proposal.confidences
    if confidences and (len(confidences) != len(proposal.token_ids) or min(confidences) < 0 or max(confidences) > 255):
        return CONFIDENCES
    return None


class HitRates(Protocol):
    def rate(self, confidence: int, depth: int) -> float:
        """Probability in (0, 1) that a token with this confidence byte, at this depth of its proposal, is right."""
        ...


class HitRatesOf(Protocol):
    def of(self, drafter_id: str) -> HitRates: ...


class Shares:
    """Share of the vote of each node among its siblings, in [0, 1], worked out when asked for.

    With `tables` (one per drafter of the draft trie) the share is a probability: the highest hit rate behind the node,
    scaled down where siblings would sum to more than 1, since one token at most is right. Siblings are ranked by all
    that is behind them: the best hit rate of each family, families combined by noisy-or. Agreement says which of two
    tokens is likelier, but drafters that read the same text are wrong together, and noisy-or as a probability would
    spend a tree on them. Without tables, it is the weight of the drafters behind the node over that of all that voted.
    """

    __slots__ = ("_families", "_known", "_tables", "_total", "_trie", "_weights")

    def __init__(
        self,
        trie: DraftTrie,
        weights: Sequence[float],
        tables: Sequence[HitRates] | None = None,
        families: Sequence[str] = (),
    ) -> None:
        self._trie = trie
        self._weights = weights
        self._total = sum(weights)
        self._tables = tables
        self._families = families
        self._known: dict[int, list[tuple[int, float]]] = {}

    def of(self, node: int) -> list[tuple[int, float]]:
        """Children of `node` with their shares, best first by the rule for ties."""
        known = self._known.get(node)
        if known is None:
            children = self._trie.children[node].values()
            if self._tables is None:
                known = [(child, self._by_weight(child)) for child in children]
            else:
                known = [(child, self._strongest(self._tables, child)) for child in children]
            if len(known) > 1:
                # Before scaling, which keeps the order and could only add rounding.
                known.sort(key=self._rank)
                total = sum([share for _, share in known])
                if total > 1.0:
                    known = [(child, share / total) for child, share in known]
            self._known[node] = known
        return known

    def known(self) -> Mapping[int, list[tuple[int, float]]]:
        """The nodes whose children's shares were asked for."""
        return self._known

    def _rank(self, entry: tuple[int, float]) -> tuple[float, float, int]:
        child, share = entry
        support = share if self._tables is None else self._batched(self._tables, child)
        heaviest = max([self._weights[drafter] for drafter, _, _ in self._trie.drafters[child]])
        # Sums of equal weights in different orders differ in the last bits; that is a tie, not a win.
        return -round(support, 12), -heaviest, self._trie.token_ids[child]

    def _by_weight(self, node: int) -> float:
        weights = self._weights
        behind = sum([weights[drafter] for drafter, _, _ in self._trie.drafters[node]])
        return behind / self._total if self._total > 0.0 else 0.0

    def _strongest(self, tables: Sequence[HitRates], node: int) -> float:
        return max(
            [tables[drafter].rate(confidence, depth) for drafter, confidence, depth in self._trie.drafters[node]]
        )

    def _batched(self, tables: Sequence[HitRates], node: int) -> float:
        best: dict[str, float] = {}
        for drafter, confidence, depth in self._trie.drafters[node]:
            family = self._families[drafter]
            rate = tables[drafter].rate(confidence, depth)
            if rate > best.get(family, 0.0):
                best[family] = rate
        miss = 1.0
        for rate in best.values():
            miss *= 1.0 - rate
        return 1.0 - miss


def majority(trie: DraftTrie, shares: Shares, weights: Sequence[float]) -> list[int]:
    """The path by majority: from the prefix, the child with the largest share at each depth."""
    path: list[int] = []
    children = shares.of(PREFIX)
    while children:
        node = children[0][0]
        path.append(node)
        children = shares.of(node)
    return path


calibrated = majority
"""The same walk; the shares are measured hit rates (see Shares)."""


def accumulated(trie: DraftTrie, shares: Shares, weights: Sequence[float]) -> list[int]:
    """The path with the largest sum of node weights."""
    sums = [0.0] * len(trie.token_ids)
    ranked: list[tuple[float, float, tuple[int, ...], int]] = []
    for node in range(1, len(trie.token_ids)):
        behind = [weights[drafter] for drafter, _, _ in trie.drafters[node]]
        sums[node] = sums[trie.parents[node]] + sum(behind)
        if not trie.children[node]:
            ranked.append((-round(sums[node], 12), -max(behind), _ids_to(trie, node), node))
    return _nodes_to(trie, min(ranked)[3]) if ranked else []


def best(trie: DraftTrie, shares: Shares, weights: Sequence[float]) -> list[int]:
    """The whole proposal of the heaviest drafter: no vote, the baseline."""
    if not trie.proposals:
        return []
    weight_of = dict(zip(trie.drafter_ids, weights, strict=True))
    heaviest = max(weights)
    # A drafter's proposals stand best first; of equally heavy drafters the lowest ids win.
    firsts: dict[str, tuple[int, ...]] = {}
    for proposal in trie.proposals:
        if weight_of[proposal.drafter_id] == heaviest:
            firsts.setdefault(proposal.drafter_id, proposal.token_ids)
    return trie.follow(min(firsts.values()))


POLICIES: dict[str, Callable[[DraftTrie, Shares, Sequence[float]], list[int]]] = {
    "majority": majority,
    "calibrated": calibrated,
    "accumulated": accumulated,
    "best": best,
}


@dataclass(frozen=True, slots=True)
class VoteResult:
    """`path`: indices into `draft` of the voted path, first token first; the rest of the draft are losers beside it.

    `winners[i]`: the drafters whose proposals run through the i-th token of the path. `agreement_ratio`: of the
    drafters that voted, the part that is behind the first token of the path; None when no drafter voted. `num_offered`:
    nodes of the shape, also those that were not worth their time. `chances`: of each node of the draft, the estimated
    probability that it is reached and accepted, never rising. `trie` and `shares` are for learning.
    """

    draft: Draft
    path: tuple[int, ...]
    winners: tuple[tuple[str, ...], ...]
    agreement_ratio: float | None
    chances: tuple[float, ...]
    num_offered: int
    trie: DraftTrie
    shares: Shares

    @property
    def path_token_ids(self) -> tuple[int, ...]:
        """Ids of the voted path."""
        return tuple([self.draft.token_ids[node] for node in self.path])

    @property
    def winner_ids(self) -> tuple[str, ...]:
        """Drafters that proposed the whole voted path."""
        return self.winners[-1] if self.winners else ()


def vote(
    proposals: Sequence[Proposal],
    weights: Mapping[str, float],
    *,
    policy: str = "majority",
    shape: str = "chain",
    num_speculative_tokens: int | None = None,
    max_draft_tokens: int | None = None,
    calibration: HitRatesOf | None = None,
    families: Mapping[str, str] | None = None,
    acceptance: Acceptance | None = None,
    spend: Callable[[Sequence[float]], int] | None = None,
) -> VoteResult:
    """One draft out of valid proposals. Reads the tables and changes nothing.

    A drafter without a weight weighs 1. The draft is at most `num_speculative_tokens` deep and has at most
    `max_draft_tokens` nodes; `spend` is told their probabilities, which never rise, and says how many are kept.
    `calibrated` needs `calibration`; a drafter without an entry in `families` is a family of its own. `best` is always
    a chain.
    Raises ConfigError for an unknown policy or shape.
    """
    choose, select = named("vote", policy, POLICIES), named("shape", shape, SHAPES)
    trie = DraftTrie(proposals, num_speculative_tokens)
    numbers = [weights.get(drafter_id, 1.0) for drafter_id in trie.drafter_ids]
    if policy == "calibrated":
        if calibration is None:
            raise ValueError("the calibrated vote needs a calibration")
        tables = [calibration.of(drafter_id) for drafter_id in trie.drafter_ids]
        family_of = families or {}
        shares = Shares(trie, numbers, tables, [family_of.get(id_, id_) for id_ in trie.drafter_ids])
    else:
        shares = Shares(trie, numbers)
    voted = choose(trie, shares, numbers)
    limit = len(trie) if max_draft_tokens is None else max(max_draft_tokens, 0)
    if policy == "best":
        select = SHAPES["chain"]
    nodes, probabilities = select(trie, shares, voted, limit, acceptance)
    num_offered = len(nodes)
    if spend is not None:
        count = spend(probabilities)
        nodes, probabilities = nodes[:count], probabilities[:count]
    index_of = {node: index for index, node in enumerate(nodes)}
    path = [node for node in voted if node in index_of]
    ids = trie.drafter_ids
    return VoteResult(
        draft=to_draft(trie, nodes),
        path=tuple([index_of[node] for node in path]),
        winners=tuple([tuple([ids[drafter] for drafter, _, _ in trie.drafters[node]]) for node in path]),
        agreement_ratio=len(trie.drafters[voted[0]]) / len(ids) if voted else None,
        chances=tuple(probabilities),
        num_offered=num_offered,
        trie=trie,
        shares=shares,
    )


def _nodes_to(trie: DraftTrie, node: int) -> list[int]:
    nodes: list[int] = []
    while node != PREFIX:
        nodes.append(node)
        node = trie.parents[node]
    return nodes[::-1]


def _ids_to(trie: DraftTrie, node: int) -> tuple[int, ...]:
    return tuple([trie.token_ids[on_path] for on_path in _nodes_to(trie, node)])
