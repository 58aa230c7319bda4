"""The queue of commands: each stream has its own bound, and one that is over opens nothing any more."""

from __future__ import annotations

import pytest

from moot.core.errors import NoCapacity
from moot.core.types import SamplingParams
from services.verifier.admission import Intake
from services.verifier.commands import Abort, Open
from services.verifier.sessions import Stream


def opening(session_id: int) -> Open:
    return Open(session_id, "request", (1, 2, 3), SamplingParams())


def make_stream() -> Stream:
    return Stream(lambda answers: None)


def make_intake() -> Intake:
    return Intake(max_sessions=8, max_waiting_tokens=100, max_queued_commands=10, context_limit=50)


def test_a_flooding_stream_leaves_room_for_the_others() -> None:
    """What one peer has queued does not end another's stream; what was taken does not count any more."""
    intake, flooding, good = make_intake(), make_stream(), make_stream()
    flood = [Abort(number) for number in range(10)]
    intake.offer(flooding, flood)
    assert intake.offer(good, [opening(1), Abort(1)]) == []
    with pytest.raises(NoCapacity):
        intake.offer(flooding, flood[:1])
    assert len(intake.take()) == 12
    assert intake.offer(flooding, flood) == []


def test_commands_after_the_end_of_their_stream_open_nothing() -> None:
    """A frame that was on its way when its peer was lost: nobody would ever free its sessions."""
    intake, stream = make_intake(), make_stream()
    intake.offer(stream, [opening(1)])
    intake.end(stream)
    assert intake.offer(stream, [opening(2)]) == []
    assert [arrival.command and arrival.command.session_id for arrival in intake.take()] == [1, None]
    assert intake.num_sessions == 1
