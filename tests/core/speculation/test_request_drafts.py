"""The drafting of one request: proposals that move with the text, what drafters are told, and what is learned."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moot.core.speculation.policy import PoolPolicy, SpeculationOptions, make_policy
from moot.core.speculation.request_drafts import RequestDrafts
from moot.core.types import Proposal
from moot.core.voting.calibration import DrafterTable

PROMPT = 5


class Driven:
    """A request with a text that is known: `step` commits its next tokens, `propose` sends a drafter's path."""

    def __init__(self, *drafter_ids: str, pool: PoolPolicy | None = None, length: int | None = None) -> None:
        self.pool = pool or make_policy()
        self.output: list[int] = []
        self.drafts = RequestDrafts(self.pool, drafter_ids, PROMPT, self.output, length)

    def step(self, *token_ids: int, price: float = 0.0, local: Sequence[Proposal] = ()) -> None:
        self.output.extend(token_ids)
        self.drafts.committed(token_ids, len(token_ids) - 1, price, local)

    def propose(self, drafter_id: str, base: int, *token_ids: int) -> bool:
        proposal = Proposal(token_ids, (128,) * len(token_ids), drafter_id)
        return self.drafts.proposed(drafter_id, PROMPT + base, (proposal,))

    def drafted(self) -> tuple[int, ...]:
        draft = self.drafts.draft()
        return () if draft is None else draft.draft.token_ids


def test_a_proposal_stays_for_as_long_as_it_fits() -> None:
    """Early, late, and moved on: the draft is what of it comes after the committed tokens, for that very length."""
    request = Driven("a")
    assert request.propose("a", 0, 1, 2, 3, 4)
    assert request.drafted() == (1, 2, 3, 4)
    request.step(1, 2)
    draft = request.drafts.draft()
    assert draft is not None
    assert (draft.base_length, draft.draft.token_ids) == (PROMPT + 2, (3, 4))
    assert request.propose("a", 0, 1, 2, 3, 4, 5)
    assert request.drafted() == (3, 4, 5)
    request.step(9)
    assert request.drafted() == ()
    assert not request.propose("a", 0, 1, 2, 3, 4, 5, 6)
    assert not request.propose("a", 2, 9)
    assert request.drafted() == ()


def test_drafters_of_different_bases_vote_on_the_same_tokens() -> None:
    """One drafted from before the last step, one from after it: both stand behind the token that they agree on."""
    request = Driven("old", "new", pool=make_policy(SpeculationOptions(vote="majority", shape="chain")))
    request.propose("old", 0, 1, 2, 3)
    request.step(1)
    request.propose("new", 1, 2, 7)
    draft = request.drafts.draft()
    assert draft is not None
    assert draft.draft.token_ids[0] == 2
    assert {one.drafter_id: one.offset for one in draft.proposals} == {"old": 1, "new": 0}


def test_a_verifier_holds_the_same_vote_that_the_router_would() -> None:
    """With the policy of this moment, the proposals that came and those made at the verifier make the draft that the
    router would make of all of them, node by node and chance by chance."""
    source = random.Random(2)
    pool = make_policy()
    request = Driven("a", "b", pool=pool)
    for _ in range(60):
        token = source.randrange(3)
        for drafter_id in "ab":
            request.propose(drafter_id, len(request.output), *[source.randrange(3) for _ in range(3)])
        request.step(token)
    for drafter_id in "ab":
        request.propose(drafter_id, len(request.output), *[source.randrange(3) for _ in range(3)])
    held = request.drafts.draft()
    assert held is not None
    local = Proposal(tuple(source.randrange(3) for _ in range(3)), (40, 50, 60), "c")
    policy = pool.vote_policy(1, ["a", "b", "c"])
    there = policy.apply([*held.proposals, local])
    together = Driven("a", "b", "c", pool=pool)
    together.output.extend(request.output)
    for proposal in (*held.proposals, local):
        together.drafts.proposed(proposal.drafter_id, together.drafts.length, (proposal,))
    here = together.drafts.draft()
    assert here is not None
    assert there.draft == here.draft
    assert there.chances == pytest.approx(here.chances, rel=1e-12)


def test_drafters_are_told_when_their_path_is_left_and_in_time_before_it_ends() -> None:
    """At the start; not again while it drafts for what was told; at once when the path is left; and while the path is
    followed only every few tokens."""
    request = Driven("a", length=4)
    assert request.drafts.questions() == ["a"]
    assert request.drafts.questions() == []
    request.propose("a", 0, 1, 2, 3, 4, 5, 6)
    request.step(1)
    assert request.drafts.questions() == []
    told = 0
    for token in range(2, 6):
        request.step(token)
        told += len(request.drafts.questions())
    assert told == 1
    request.step(99)
    assert request.drafts.questions() == ["a"]
    assert request.drafts.questions() == []


def test_a_lost_drafter_is_told_anew_and_its_proposal_stays() -> None:
    """What it proposed is as good as before; the session that takes its place knows nothing."""
    request = Driven("a")
    request.drafts.questions()
    request.propose("a", 0, 1, 2)
    request.drafts.lost("a")
    assert request.drafts.questions() == ["a"]
    assert request.drafted() == (1, 2)


def test_no_drafter_is_asked_where_no_row_pays() -> None:
    """A full verifier: the price is above the chance of a first token, and but for probes nobody drafts; when the price
    falls drafting begins again, as deep as pays."""
    pool = make_policy()
    request = Driven("a", pool=pool)
    asked = 0
    for token in range(200):
        request.propose("a", len(request.output), token + 1)
        request.step(token, price=0.9)
        asked += len(request.drafts.questions())
    assert request.drafts.ahead == 0
    assert 1 <= asked <= 20
    for token in range(200):
        request.propose("a", len(request.output), *range(token, token + 3))
        request.step(token, price=0.02)
    assert request.drafts.ahead >= 3


@pytest.mark.parametrize("length", [0, 2])
def test_a_number_of_tokens_that_is_asked_for_holds_at_every_price(length: int) -> None:
    """`num_speculative_tokens`: 0 asks nobody, n drafts n deep whatever a row costs."""
    request = Driven("a", length=length)
    request.step(1, price=0.99)
    assert bool(request.drafts.questions()) == bool(length)
    assert (request.drafts.ahead > length) == bool(length)


@given(st.integers(), st.integers(1, 3))
def test_every_token_of_a_drafter_is_counted_once_however_late(seed: int, most: int) -> None:
    """On time, late, sent again or longer than before: hits and misses of its table are those of the text."""
    source = random.Random(seed)
    text = [source.randrange(2) for _ in range(40)]
    pool = make_policy()
    request = Driven("a", pool=pool)
    counted: list[bool] = []

    class Counted(DrafterTable):
        def record(self, confidence: int, depth: int, hit: bool) -> None:
            counted.append(hit)

    pool.calibration._tables["a"] = Counted()
    expected: list[bool] = []
    position = 0
    while position + 6 < len(text):
        path = [source.randrange(2) for _ in range(source.randrange(1, 5))]
        request.propose("a", position, *path)
        for depth, token in enumerate(path):
            expected.append(token == text[position + depth])
            if token != text[position + depth]:
                break
        until = position + len(path) + 1
        while position < until:
            count = min(source.randrange(1, most + 1), until - position)
            request.step(*text[position : position + count])
            position += count
            if source.random() < 0.5:
                request.propose("a", until - len(path) - 1, *path)
    assert counted == expected


def test_a_policy_knows_nothing_of_a_drafter_that_is_new() -> None:
    """The policy that is sent knows a drafter that the router has never heard of as one that has not begun."""
    policy = make_policy().vote_policy(3, ["a"])
    assert policy.number == 3
    assert policy.of("a").rates == policy.of("nobody").rates
