"""What one side says is what the other side understands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moot.core.types import Draft, FinishReason, ModelInfo, Proposal, SamplingParams, TokenLogprobs, Verification
from moot.rpc import convert
from moot.v1 import token_pb2, verifier_service_pb2

IDS = st.integers(0, 2**32 - 1)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 100),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.frozensets(IDS, min_size=1, max_size=3),
    max_tokens=st.integers(1, 1000),
    min_tokens=st.integers(0, 10),
    stop_token_ids=st.frozensets(IDS, max_size=3),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.none() | st.integers(0, 20),
)


@settings(max_examples=50)
@given(params=PARAMS)
def test_sampling_params_survive_the_wire(params: SamplingParams) -> None:
    """The text is a function of these: not one bit may change between router and verifier."""
    message = token_pb2.SamplingParams.FromString(convert.sampling_to_pb(params).SerializeToString())
    assert convert.sampling_from_pb(message) == params


@settings(max_examples=50)
@given(data=st.data(), size=st.integers(0, 12))
def test_drafts_survive_the_wire(data: st.DataObject, size: int) -> None:
    """A chain stays a chain (and travels without parents), a tree keeps its parents."""
    parents = tuple(data.draw(st.integers(-1, index - 1)) for index in range(size))
    draft = Draft(tuple(range(100, 100 + size)), parents)
    message = convert.draft_to_pb(draft, round_index=3, base_length=17)
    assert (message.round_index, message.base_length) == (3, 17)
    assert bool(message.parent_indices) == (not draft.is_chain)
    assert convert.draft_from_pb(message) == draft


@pytest.mark.parametrize(
    ("ids", "parents"), [((1, 2), (-1,)), ((1, 2), (-1, 1)), ((1, 2), (-1, -2)), ((5, 5), (-1, -1)), ((1,), (-1, 0))]
)
def test_malformed_trees_are_refused(ids: tuple[int, ...], parents: tuple[int, ...]) -> None:
    """Parents come before children, one for each token, and siblings differ."""
    message = verifier_service_pb2.VerifyDraft(draft_token_ids=ids, parent_indices=parents)
    with pytest.raises(ValueError, match="draft"):
        convert.draft_from_pb(message)


def test_verifications_survive_the_wire() -> None:
    """Ids, counts, log-probabilities, candidates and timing arrive as they were sent; floats as float32."""
    sent = Verification(
        base_length=9,
        num_accepted=1,
        output_token_ids=(4, 5),
        finish_reason=FinishReason.STOP,
        logprobs=(TokenLogprobs(-0.5, 1, ((4, -0.5), (7, -1.25))), TokenLogprobs(-2.0, 3)),
        top_candidates=((4, 7), (5, 1)),
        proposals=(Proposal((1, 2), (200, 100), "heads"),),
        queue_us=5,
        forward_us=6,
        batch_requests=2,
        batch_tokens=10,
        batch_prefill_tokens=7,
    )
    message = convert.verified_to_pb(sent, round_index=2)
    assert message.round_index == 2
    assert convert.verified_from_pb(message) == sent
    opened = Verification(base_length=9, num_accepted=0, output_token_ids=(4,), num_cached_tokens=8)
    assert convert.opened_from_pb(convert.opened_to_pb(opened)) == opened


def test_odd_messages_are_refused_not_guessed() -> None:
    """A reason from a newer version, or candidates that fill no row, are errors."""
    with pytest.raises(ValueError, match="finish reason"):
        convert.finish_from_pb(99)
    with pytest.raises(ValueError, match="width"):
        convert.top_candidates_from_pb(token_pb2.TopCandidates(width=2, token_ids=[1, 2, 3]))


def test_model_info_survives_the_wire() -> None:
    """Fingerprints are compared before a peer is used: they must arrive whole."""
    info = ModelInfo("m", "r", "f" * 64, 49152, 8192, frozenset({2, 0}))
    assert convert.model_info_from_pb(convert.model_info_to_pb(info)) == info


def test_the_router_names_the_drafter_not_the_pod() -> None:
    """A pod cannot vote under another drafter's name."""
    message = convert.proposal_to_pb(Proposal((1,), (255,), "somebody-else"))
    assert convert.proposal_from_pb(message, "suffix") == Proposal((1,), (255,), "suffix")
