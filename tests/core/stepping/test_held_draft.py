"""Drafts that verifiers hold: what is left of them when tokens are committed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.acceptance import validate_draft
from moot.core.generation import is_path
from moot.core.stepping.held_draft import HeldDraft
from moot.core.types import ROOT, Draft, Proposal

VOCABULARY = 3


def random_draft(source: random.Random, size: int) -> HeldDraft:
    """A tree of up to `size` nodes whose chances fall from the root on, best first."""
    nodes: list[tuple[float, int, int]] = []
    frontier = [(1.0, ROOT)]
    edges: set[tuple[int, int]] = set()
    for _ in range(size):
        chance, parent = source.choice(frontier)
        token = source.randrange(VOCABULARY)
        if (parent, token) not in edges:
            edges.add((parent, token))
            nodes.append((chance * source.uniform(0.1, 0.9), parent, token))
            frontier.append((nodes[-1][0], len(nodes) - 1))
    order = sorted(range(len(nodes)), key=lambda node: -nodes[node][0])
    index_of = {node: index for index, node in enumerate(order)} | {ROOT: ROOT}
    draft = Draft(tuple(nodes[node][2] for node in order), tuple(index_of[nodes[node][1]] for node in order))
    return HeldDraft(10, draft, tuple(nodes[node][0] for node in order))


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, (parent, token) in enumerate(zip(draft.parents, draft.token_ids, strict=True)):
        found[node] = (*found[parent], token)
    return set(found.values()) - {()}


@given(st.integers(), st.integers(1, 24), st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
def test_what_is_left_are_the_paths_that_go_on_from_the_committed_tokens(
    seed: int, size: int, token_ids: list[int]
) -> None:
    """Alignment moves the root and nothing else: every path behind the committed tokens stays, no other appears, the
    order stays best first, and chances are those from the new root."""
    held = random_draft(random.Random(seed), size)
    left, num_right = held.after(token_ids)
    committed = tuple(token_ids)
    expected = {path[len(committed) :] for path in paths(held.draft) if path[: len(committed)] == committed} - {()}
    assert (paths(left.draft) if left else set()) == expected
    assert is_path(held.draft, token_ids[:num_right])
    assert num_right == len(token_ids) or not is_path(held.draft, token_ids[: num_right + 1])
    if left is not None:
        assert left.base_length == held.base_length + len(token_ids)
        assert validate_draft(left.draft, VOCABULARY, size) is None
        assert list(left.chances) == sorted(left.chances, reverse=True)


@given(st.integers(), st.integers(1, 24), st.lists(st.integers(0, VOCABULARY - 1), max_size=2), st.integers(0, 2))
def test_tokens_may_be_committed_one_by_one_or_together(seed: int, size: int, token_ids: list[int], cut: int) -> None:
    """How a verifier's steps cut the text makes no difference to the draft that it holds."""
    held = random_draft(random.Random(seed), size)
    together, _ = held.after(token_ids)
    first, _ = held.after(token_ids[:cut])
    apart = None if first is None else first.after(token_ids[cut:])[0]
    if together is None:
        assert apart is None
    else:
        assert apart is not None
        assert (apart.draft, apart.base_length) == (together.draft, together.base_length)
        assert apart.chances == pytest.approx(together.chances)


def test_every_piece_is_a_draft_of_the_best_nodes() -> None:
    """A step verifies as many nodes as it can afford: parents come before their children in every head."""
    held = random_draft(random.Random(3), 20)
    for count in range(len(held.draft) + 3):
        piece = held.piece(count)
        assert piece.token_ids == held.draft.token_ids[:count]
        assert validate_draft(piece, VOCABULARY, count) is None


def test_proposals_move_with_the_draft_and_remember_their_own_depth() -> None:
    """The vote where the step is planned sees each proposal at the depth that its drafter made it at."""
    proposals = (Proposal((1, 2, 0), (9, 8, 7), "a"), Proposal((1, 0), (6, 5), "b"), Proposal((2, 2), (4, 3), "c"))
    held = HeldDraft(10, Draft.chain((1, 2, 0)), (0.9, 0.6, 0.3), proposals)
    left, num_right = held.after((1, 2))
    assert num_right == 2
    assert left == HeldDraft(12, Draft.chain((0,)), (0.5,), (Proposal((0,), (7,), "a", offset=2),))
    assert left.after((0,)) == (None, 1)
    assert left.after((1,)) == (None, 0)
