"""The walk: the text is the target's, whatever the draft; kinds of cases C03, C09, C10, C11, C33."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.acceptance import Walk, validate_draft, walk
from moot.core.types import ROOT, Draft, FinishReason

VOCAB = 4
END = 0


def target_token(path: tuple[int, ...], salt: int) -> int:
    """A deterministic target over a tiny vocabulary: its token depends on all tokens before."""
    state = salt
    for token in path:
        state = (state * 31 + token + 7) % 1009
    return state % VOCAB


def plain(salt: int, max_new: int, ends: bool) -> tuple[int, ...]:
    """What plain decoding emits: one token after another, no draft."""
    output: tuple[int, ...] = ()
    while len(output) < max_new:
        output = (*output, target_token(output, salt))
        if ends and output[-1] == END:
            break
    return output


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Any tree over the tiny vocabulary, in any order that keeps parents before children."""
    edges: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 12))):
        edge = (draw(st.integers(ROOT, len(edges) - 1)), draw(st.integers(0, VOCAB - 1)))
        if edge not in edges:
            edges.append(edge)
    return Draft(tuple(token for _, token in edges), tuple(parent for parent, _ in edges))


@st.composite
def true_drafts(draw: st.DrawFn, salt: int) -> Draft:
    """The target's own continuation, corrupted at a drawn place, with siblings grown at drawn places."""
    length = draw(st.integers(0, 6))
    chain = list(plain(salt, length, ends=False))
    if draw(st.booleans()) and chain:
        chain[draw(st.integers(0, len(chain) - 1))] = draw(st.integers(0, VOCAB - 1))
    token_ids: list[int] = []
    parents: list[int] = []
    node = ROOT
    for token in chain:
        sibling = draw(st.integers(0, VOCAB - 1))
        if sibling != token and draw(st.booleans()):
            token_ids.append(sibling)
            parents.append(node)
        token_ids.append(token)
        parents.append(node)
        node = len(token_ids) - 1
    return Draft(tuple(token_ids), tuple(parents))


TokenAt = Callable[[int, tuple[int, ...]], int]
IsEnd = Callable[[int, int], bool]
Rule = Callable[[Draft, TokenAt, IsEnd, int], Walk]
DraftOf = Callable[[tuple[int, ...]], Draft]


def never(token: int, n: int) -> bool:
    """Nothing ends the request but its length."""
    return False


def decode(rule: Rule, salt: int, draft_of: DraftOf, max_new: int, ends: bool) -> list[Walk]:
    """Rounds of `rule` until the request ends."""
    walks: list[Walk] = []
    output: tuple[int, ...] = ()
    while True:
        done = output
        result = rule(
            draft_of(done),
            lambda node, path, done=done: target_token((*done, *path), salt),  # type: ignore[misc]  # bound early
            lambda token, n: ends and token == END,
            max_new - len(done),
        )
        walks.append(result)
        output = (*output, *result.output_token_ids)
        if result.finish is not None or len(walks) > 200:
            return walks


def violations(rule: Rule, salt: int, draft_of: DraftOf, max_new: int, ends: bool) -> str:
    """The property checker: empty when the rounds emit plain decoding's text and account for it rightly."""
    walks = decode(rule, salt, draft_of, max_new, ends)
    expected = plain(salt, max_new, ends)
    output: tuple[int, ...] = ()
    for result in walks:
        draft = draft_of(output)
        ids = tuple(draft.token_ids[node] for node in result.accepted_nodes)
        if ids != result.output_token_ids[: result.num_accepted]:
            return "accepted nodes are not the head of the output"
        if any(
            draft.parents[b] != a for a, b in zip((ROOT, *result.accepted_nodes), result.accepted_nodes, strict=False)
        ):
            return "accepted nodes are not one path from the root"
        if result.num_accepted + (result.finish is None) > len(result.output_token_ids):
            return "no next token in a round that did not end"
        if len(result.output_token_ids) > result.num_accepted + 1:
            return "more than one token of the target's own"
        output = (*output, *result.output_token_ids)
    if output != expected:
        return f"text {output} differs from plain {expected}"
    last = walks[-1].finish
    if last is not (FinishReason.STOP if ends and expected and expected[-1] == END else FinishReason.LENGTH):
        return f"finish reason {last}"
    return ""


@settings(max_examples=150)
@given(st.integers(0, 1008), st.integers(0, 20), st.booleans(), st.data())
def test_text_is_plain_decoding_for_any_tree(salt: int, max_new: int, ends: bool, data: st.DataObject) -> None:
    """Whatever the drafts, rounds emit plain decoding's ids, ended at the same token for the same reason."""
    seen: dict[tuple[int, ...], Draft] = {}

    def draft_of(done: tuple[int, ...]) -> Draft:
        if done not in seen:
            seen[done] = data.draw(drafts() if done else true_drafts(salt))
        return seen[done]

    assert violations(walk, salt, draft_of, max_new, ends) == ""


def chain_of_truth(salt: int, length: int) -> DraftOf:
    return lambda done: Draft.chain(plain(salt, len(done) + length, ends=False)[len(done) :])


def corrupted(salt: int) -> DraftOf:
    """A wrong sibling stands before the right token at the root and under the first token."""

    def draft_of(done: tuple[int, ...]) -> Draft:
        ids = chain_of_truth(salt, 3)(done).token_ids
        wrong = tuple((token + 1) % VOCAB for token in ids)
        return Draft((wrong[0], ids[0], wrong[1], ids[1], ids[2]), (ROOT, ROOT, 1, 1, 3))

    return draft_of


def lying(salt: int) -> DraftOf:
    return lambda done: Draft.chain(tuple((t + 1) % VOCAB for t in chain_of_truth(salt, 3)(done).token_ids))


def first_unchecked(draft: Draft, token_at: TokenAt, is_end: IsEnd, max_new: int) -> Walk:
    """Commits the first draft token without asking the target (C03)."""
    if not draft.token_ids or max_new < 2:
        return walk(draft, token_at, is_end, max_new)
    first = draft.token_ids[0]
    return walk(draft, lambda node, path: first if node == ROOT else token_at(node, path), is_end, max_new)


def accept_by_vote(draft: Draft, token_at: TokenAt, is_end: IsEnd, max_new: int) -> Walk:
    """Takes the whole voted path and asks the target for the bonus token only (C33)."""
    length = min(len(draft.token_ids), max_new)
    ids = draft.token_ids[:length]
    if length < max_new:
        ids = (*ids, token_at(length - 1, ids))
    return Walk(tuple(range(length)), ids, None if length + 1 < max_new else FinishReason.LENGTH)


def past_the_end(draft: Draft, token_at: TokenAt, is_end: IsEnd, max_new: int) -> Walk:
    """Looks for the end only at the last token of the round (C10)."""
    whole = walk(draft, token_at, never, max_new)
    ended = bool(whole.output_token_ids) and is_end(whole.output_token_ids[-1], len(whole.output_token_ids))
    return replace(whole, finish=FinishReason.STOP if ended else whole.finish)


def skip_next(draft: Draft, token_at: TokenAt, is_end: IsEnd, max_new: int) -> Walk:
    """Withholds the next token of a round that accepted something."""
    whole = walk(draft, token_at, is_end, max_new)
    if whole.num_accepted and whole.finish is None:
        return replace(whole, output_token_ids=whole.output_token_ids[: whole.num_accepted])
    return whole


def sibling_order(draft: Draft, token_at: TokenAt, is_end: IsEnd, max_new: int) -> Walk:
    """Follows the first sibling that stands in the draft instead of the one the target sampled."""

    def sampled(node: int, path: tuple[int, ...]) -> int:
        siblings = [token for token, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == node]
        token = token_at(node, path)
        return siblings[0] if token in siblings else token

    return walk(draft, sampled, is_end, max_new)


WRONG: dict[str, Rule] = {
    "first unchecked": first_unchecked,
    "accept by vote": accept_by_vote,
    "past the end": past_the_end,
    "the next token does not count against max_tokens (C11)": lambda draft, at, end, n: walk(draft, at, end, n + 1),
    "the committed prefix's row everywhere": lambda draft, at, end, n: walk(draft, lambda *_: at(ROOT, ()), end, n),
    "skip next": skip_next,
    "sibling order": sibling_order,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_detected(name: str) -> None:
    """Each rule that looks right but is not must be rejected by the property checker on some small case."""
    assert any(
        violations(WRONG[name], salt, make(salt), max_new, ends)
        for salt in range(12)
        for max_new in (1, 4, 9)
        for ends in (False, True)
        for make in (lambda salt: chain_of_truth(salt, 4), corrupted, lying)
    )


@pytest.mark.parametrize("ends", [False, True])
def test_right_rule_passes_where_wrong_ones_are_tried(ends: bool) -> None:
    """The checker that rejects the wrong rules accepts the right one on the very same kind of drafts."""
    for salt, max_new in itertools.product(range(12), range(1, 10)):
        assert violations(walk, salt, chain_of_truth(salt, 8), max_new, ends) == ""


def test_first_draft_token_is_checked() -> None:
    """C03: draft [1], the target says 2: rejected, 2 emitted."""
    result = walk(Draft.chain((1,)), lambda node, path: 2, never, 8)
    assert (result.num_accepted, result.output_token_ids, result.finish) == (0, (2,), None)


def test_non_first_sibling_is_accepted() -> None:
    """A tree is walked by the target's token, not by the order of siblings; rows off the path are never asked."""
    draft = Draft((3, 1, 2, 9, 8), (ROOT, ROOT, 1, 1, 2))
    asked: list[tuple[int, tuple[int, ...]]] = []

    def token_at(node: int, path: tuple[int, ...]) -> int:
        asked.append((node, path))
        return {ROOT: 1, 1: 9, 3: 4}[node]

    result = walk(draft, token_at, never, 8)
    assert (result.accepted_nodes, result.output_token_ids) == ((1, 3), (1, 9, 4))
    assert asked == [(ROOT, ()), (1, (1,)), (3, (1, 9))]


@pytest.mark.parametrize("place", range(8))
def test_end_token_inside_accepted_draft(place: int) -> None:
    """C10: the end token is accepted and counted, nothing after it is emitted, no next token is sampled; with
    ignore_eos it is like any other."""
    ids = tuple(END if i == place else 5 for i in range(8))
    asked: list[int] = []

    def token_at(node: int, path: tuple[int, ...]) -> int:
        asked.append(node)
        return (*ids, 5)[node + 1]

    result = walk(Draft.chain(ids), token_at, lambda token, n: token == END, 100)
    assert result.output_token_ids == ids[: place + 1]
    assert (result.num_accepted, result.finish, len(asked)) == (place + 1, FinishReason.STOP, place + 1)
    ignored = walk(Draft.chain(ids), token_at, never, 100)
    assert (ignored.num_accepted, ignored.output_token_ids, ignored.finish) == (8, (*ids, 5), None)


@pytest.mark.parametrize("max_new", range(10))
def test_max_tokens_inside_accepted_draft(max_new: int) -> None:
    """C11: never more tokens than asked for; the bonus token counts against the limit as well."""
    result = walk(Draft.chain((5,) * 8), lambda node, path: 5, never, max_new)
    assert len(result.output_token_ids) == min(max_new, 9)
    assert result.num_accepted == min(max_new, 8)
    assert result.finish is (FinishReason.LENGTH if max_new <= 9 else None)


def test_end_is_told_the_number_of_new_tokens() -> None:
    """min_tokens counts tokens: `is_end` gets 1 for the first token of the walk, 2 for the second."""
    seen: list[tuple[int, int]] = []

    def is_end(token: int, n: int) -> bool:
        seen.append((token, n))
        return False

    walk(Draft.chain((5, 6)), lambda node, path: (5, 6, 7)[node + 1], is_end, 9)
    assert seen == [(5, 1), (6, 2), (7, 3)]


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (Draft((1, 2), (ROOT,)), "differ in number"),
        (Draft.chain((1, 2, 3, 4, 5)), "more than 4"),
        (Draft((1, 2), (ROOT, 1)), "before its child"),
        (Draft((1, 2), (ROOT, -2)), "before its child"),
        (Draft.chain((1, 10)), "vocabulary"),
        (Draft.chain((1, -1)), "vocabulary"),
        (Draft((1, 1), (ROOT, ROOT)), "same token id"),
    ],
)
def test_malformed_drafts_have_a_reason(draft: Draft, reason: str) -> None:
    """A verifier refuses a draft that would index out of range or be ambiguous (C07, C20)."""
    assert reason in (validate_draft(draft, 10, 4) or "")


@given(drafts())
@settings(max_examples=50)
def test_wellformed_drafts_have_none(draft: Draft) -> None:
    """Every tree with parents first, distinct siblings and known ids is verified."""
    assert validate_draft(draft, VOCAB, 12) is None
