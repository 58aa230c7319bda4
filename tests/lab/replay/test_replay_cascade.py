"""A cascade in a replay spares whom a router's would: expensive drafters, in rounds in which the others are sure."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from lab.replay.evaluate import Policies, Replay, ReplayOutcome, outcome_of
from lab.replay.folder import Recording, drafter_path, open_recording
from lab.replay.proposals import ProposalRecord, save_record
from lab.replay.replayed_rounds import Clock
from moot.core.speculation.drafter_selection import ALWAYS_ASK
from moot.drafters.interface import parse_entries
from moot.simulation.machine_costs import StepCost
from tests.lab.replay.recordings import made_up_texts, make_recording

FAST_S, SLOW_S = 1e-5, 0.030
CLOCK = Clock(step=StepCost.line(0.040, 0.0), overhead_s=0.0)


def timed(recording: Recording, seconds: dict[str, float]) -> Replay:
    """The same recording as if every answer of a drafter had taken so long."""
    for id_, record in recording.records.items():
        record.told_s = array("f", [0.0] * record.num_places)
        record.asked_s = array("f", [seconds.get(id_, FAST_S)] * record.num_places)
    return Replay(recording)


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    return timed(make_recording(tmp_path_factory.mktemp("cascade"), made_up_texts()), {"ngram": SLOW_S})


def found(replay: Replay, cascade: float, *drafter_ids: str) -> ReplayOutcome:
    return outcome_of(replay.run(Policies(cascade=cascade, drafter_ids=drafter_ids, clock=CLOCK)))


def test_the_surer_the_cheap_must_be_the_more_are_asked(replay: Replay) -> None:
    """From asking always to asking hardly ever: only the expensive one is skipped, its time is saved, and what it alone
    had right is lost; at no threshold is the text another one (the replay would not end)."""
    always, some, never = found(replay, ALWAYS_ASK), found(replay, 0.4), found(replay, 0.0)
    assert always.skipped == {}
    assert always.draft_seconds == pytest.approx(SLOW_S * always.num_rounds, rel=1e-3)
    assert set(some.skipped) == set(never.skipped) == {"ngram"}
    assert 0 < some.skipped["ngram"] < some.num_rounds
    # It is not known to be expensive before its first answer, nor without a round behind it.
    assert never.num_rounds - never.skipped["ngram"] in (1, 2)
    asked = some.num_rounds - some.skipped["ngram"]
    assert some.draft_seconds == pytest.approx(SLOW_S * asked + FAST_S * some.skipped["ngram"], rel=1e-3)
    assert some.draft_seconds < always.draft_seconds
    assert always.num_tokens == some.num_tokens == never.num_tokens


def test_whoever_is_cheap_is_asked_always(replay: Replay) -> None:
    """Without an expensive drafter a cascade changes nothing."""
    cheap = tuple(id_ for id_ in replay.drafter_ids if id_ != "ngram")
    assert found(replay, 0.0, *cheap) == found(replay, ALWAYS_ASK, *cheap)


def test_a_drafter_inside_the_verifier_is_never_expensive(tmp_path: Path) -> None:
    """Its answer is there before anybody is asked, however long it took: its time comes on top of the others'."""
    recording = make_recording(tmp_path, made_up_texts(2), ("suffix", "ngram"))
    (entry,) = parse_entries(["within=heads:path=none"], "--drafters")
    copied = recording.records["ngram"]
    facts = copied.facts.__class__(entry.drafter_id, entry.kind, "heads", entry.options, 8, 1)
    columns = {name: getattr(copied, name) for name in ProposalRecord.__slots__ if name != "facts"}
    save_record(drafter_path(tmp_path, entry.drafter_id), ProposalRecord(facts, **columns))
    replay = timed(open_recording(tmp_path), {"within": SLOW_S, "ngram": SLOW_S})
    outcome = found(replay, 0.0)
    assert set(outcome.skipped) == {"ngram"}
    asked = outcome.num_rounds - outcome.skipped["ngram"]
    assert outcome.draft_seconds == pytest.approx(SLOW_S * (outcome.num_rounds + asked), rel=1e-2)
