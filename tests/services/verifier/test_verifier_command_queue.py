"""The queue of commands: each stream has its own bound, and one that is over opens nothing any more."""

from __future__ import annotations

import pytest

from moot.core.errors import NoCapacity
from moot.core.types import SamplingParams
from services.verifier.command_queue import CommandQueue
from services.verifier.commands import Abort, Open
from services.verifier.sessions import AnswerStream


def opening(session_id: int) -> Open:
    return Open(session_id, "request", (1, 2, 3), SamplingParams())


def make_stream() -> AnswerStream:
    return AnswerStream(lambda answers: None)


def make_intake() -> CommandQueue:
    return CommandQueue(max_sessions=8, max_waiting_tokens=100, max_queued_commands=10, context_limit=50)


def test_a_flooding_stream_leaves_room_for_the_others() -> None:
    """What one peer has queued does not end another's stream; what was taken does not count any more."""
    command_queue, flooding, good = make_intake(), make_stream(), make_stream()
    flood = [Abort(number) for number in range(10)]
    command_queue.offer(flooding, flood)
    assert command_queue.offer(good, [opening(1), Abort(1)]) == []
    with pytest.raises(NoCapacity):
        command_queue.offer(flooding, flood[:1])
    assert len(command_queue.take()) == 12
    assert command_queue.offer(flooding, flood) == []


def test_commands_after_the_end_of_their_stream_open_nothing() -> None:
    """A frame that was on its way when its peer was lost: nobody would ever free its sessions."""
    command_queue, stream = make_intake(), make_stream()
    command_queue.offer(stream, [opening(1)])
    command_queue.end(stream)
    assert command_queue.offer(stream, [opening(2)]) == []
    assert [arrival.command and arrival.command.session_id for arrival in command_queue.take()] == [1, None]
    assert command_queue.num_sessions == 1
