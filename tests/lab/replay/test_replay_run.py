"""A replay decides as a router does, forgets everything between runs, and never passes its bounds."""

from __future__ import annotations

import itertools

import pytest

from lab.replay.evaluate import Policies, Replay, by_group, outcome_of
from moot.core.errors import ConfigError
from moot.core.speculation.length import LENGTHS
from moot.core.speculation.policy import SpeculationOptions, make_policy
from moot.core.voting.draft_trie import SHAPES
from moot.core.voting.voting import POLICIES
from moot.core.voting.weights import WEIGHTS
from tests.lab.replay.recordings import made_up_texts, make_recording


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    return Replay(make_recording(tmp_path_factory.mktemp("recording"), made_up_texts(), width=3))


@pytest.mark.parametrize(("vote", "shape", "weights", "length"), itertools.product(POLICIES, SHAPES, WEIGHTS, LENGTHS))
def test_every_bundle_writes_the_recorded_texts(
    replay: Replay, vote: str, shape: str, weights: str, length: str
) -> None:
    """Whatever is decided, each text comes out as recorded, ended for the recorded reason; counts are in order."""
    played = replay.run(Policies(vote=vote, shape=shape, weights=weights, length=length, max_draft_tokens=9))
    for text, one in zip(replay.recording.texts, played, strict=True):
        generation = one.generation
        assert tuple(generation.output_token_ids) == text.output_token_ids
        assert generation.finish_reason is text.finish_reason
        assert generation.num_accepted_tokens <= generation.num_draft_tokens <= 9 * generation.num_rounds
        # The opening and each round add one token of the target's own, unless the text ended inside a draft.
        own = len(text.output_token_ids) - generation.num_accepted_tokens
        assert own in (generation.num_rounds, generation.num_rounds + 1)
        assert sum(one.lengths.values()) == generation.num_rounds
        assert one.seconds > 0.0368 * generation.num_rounds


@pytest.mark.parametrize("length", LENGTHS)
def test_a_second_run_is_the_first(replay: Replay, length: str) -> None:
    """Nothing learned in one run reaches the next: not through the replay, and not by another policy's run between."""
    policies = Policies(vote="calibrated", length=length)
    first = replay.run(policies)
    replay.run(Policies(vote="majority", weights="minions"))
    second = replay.run(policies)
    assert [one.generation for one in first] == [one.generation for one in second]
    assert [one.seconds for one in first] == [one.seconds for one in second]
    # Worth something only because learning does change what comes next.
    pool = make_policy(SpeculationOptions(vote="calibrated", length=length))
    replay.run(policies, pool)
    later = outcome_of(replay.run(policies, pool))
    assert later != outcome_of(first)


def test_bounds_are_bounds(replay: Replay) -> None:
    """No policy accepts more than verifying every proposal whole, and that not more than any drafter at each depth; a
    tree with room for everything reaches the first bound exactly."""
    for width in (1, 3):
        policies = Policies(vote="calibrated", shape="tree", max_draft_tokens=1000, width=width)
        coherent, loose = (
            1 + sum(accepted for _, _, accepted in found) / sum(rounds for _, rounds, _ in found)
            for found in (replay.bound(policies, coherent=True), replay.bound(policies, coherent=False))
        )
        everything = outcome_of(replay.run(policies)).mean_acceptance_length
        assert everything == pytest.approx(coherent)
        assert coherent <= loose
        for vote, shape in itertools.product(POLICIES, SHAPES):
            found = outcome_of(replay.run(Policies(vote=vote, shape=shape, max_draft_tokens=7, width=width)))
            assert 1 < found.mean_acceptance_length <= coherent


def test_alone_each_drafter_is_verified_whole(replay: Replay) -> None:
    """One drafter's chain is accepted as far as it agrees with the text: counted by hand."""
    found = replay.alone(Policies(num_speculative_tokens=4))
    assert set(found) == set(replay.drafter_ids)
    record = replay.recording.records["suffix"]
    rounds = accepted = 0
    for index, text in enumerate(replay.recording.texts):
        places, output, done = record.of_text(index), text.output_token_ids, 1
        while done < len(output):
            room = min(4, text.max_tokens - done - 1)
            chain = places[done - 1][0].token_ids[:room] if places[done - 1] and room else ()
            right = 0
            while right < len(chain) and done + right < len(output) and chain[right] == output[done + right]:
                right += 1
            rounds, accepted, done = rounds + 1, accepted + right, done + right + 1
    outcome = outcome_of(found["suffix"])
    assert (outcome.num_rounds, outcome.num_accepted) == (rounds, accepted)
    assert set(outcome.votes_won) == {"suffix"}


def test_categories_add_up(replay: Replay) -> None:
    """Every round belongs to one category; positions never rise; votes are won by those who proposed."""
    played = replay.run(Policies())
    whole, groups = outcome_of(played), by_group(played)
    assert set(groups) == {"mt_bench", "qa"}
    assert sum(group.num_rounds for group in groups.values()) == whole.num_rounds
    assert sum(group.num_accepted for group in groups.values()) == whole.num_accepted
    positions = whole.accepted_per_position
    assert list(positions) == sorted(positions, reverse=True)
    assert set(whole.votes_won) <= set(whole.proposed)
    assert whole.num_tokens == sum(len(text.output_token_ids) - 1 for text in replay.recording.texts)


def test_no_more_is_replayed_than_was_recorded(replay: Replay) -> None:
    """A greater K or width than was asked of the drafters, and a drafter that was not, are refused."""
    for wrong in (Policies(num_speculative_tokens=9), Policies(width=4)):
        with pytest.raises(ConfigError, match="no more can be replayed"):
            replay.run(wrong)
    with pytest.raises(ConfigError, match="no drafter nobody"):
        replay.run(Policies(drafter_ids=("nobody",)))
