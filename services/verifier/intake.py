"""Where commands wait for the compute thread: bounded, and quick to say no.

Any thread offers; the compute thread takes at its step boundaries. What can be refused at once (draining, longer than
the context, too many sessions or prompt tokens waiting) is refused by `offer` itself, so that an overloaded verifier
answers in no time even while a step runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from moot.core.errors import NoCapacity
from services.verifier.commands import Command, Failed, FailureCode, Open
from services.verifier.sessions import Stream


@dataclass(frozen=True, slots=True)
class Arrival:
    """`command` None: the stream has ended."""

    stream: Stream
    command: Command | None
    arrived_ns: int


class Intake:
    """Opens that were let in count as open sessions, and their tokens as waiting ones, until they are released."""

    def __init__(
        self, max_sessions: int, max_waiting_tokens: int, max_queued_commands: int, context_limit: int
    ) -> None:
        self._max_sessions = max_sessions
        self._max_waiting_tokens = max_waiting_tokens
        self._max_queued_commands = max_queued_commands
        self._context_limit = context_limit
        self._condition = threading.Condition()
        self._arrivals: deque[Arrival] = deque()
        self._num_sessions = 0
        self._num_waiting_tokens = 0
        self._draining = False

    @property
    def num_sessions(self) -> int:
        return self._num_sessions

    @property
    def num_queued(self) -> int:
        return len(self._arrivals)

    @property
    def num_waiting_tokens(self) -> int:
        return self._num_waiting_tokens

    def offer(self, stream: Stream, commands: Sequence[Command]) -> list[Failed]:
        """Queue commands in order; the answers to those refused at once are returned.

        Commands of a stream that is over are dropped: nobody would free what they open. Raises NoCapacity when the
        stream has more commands queued than any peer in its right mind would: end it.
        """
        now = time.monotonic_ns()
        refused: list[Failed] = []
        with self._condition:
            if stream.is_over:
                return []
            if stream.num_queued + len(commands) > self._max_queued_commands:
                raise NoCapacity(f"more than {self._max_queued_commands} commands wait")
            for command in commands:
                if isinstance(command, Open) and (why := self._refusal(command)):
                    refused.append(why)
                else:
                    self._arrivals.append(Arrival(stream, command, now))
                    stream.num_queued += 1
            self._condition.notify()
        return refused

    def end(self, stream: Stream) -> None:
        """The stream is over: its sessions are to be aborted. Never refused."""
        with self._condition:
            stream.is_over = True
            self._arrivals.append(Arrival(stream, None, time.monotonic_ns()))
            self._condition.notify()

    def take(self) -> list[Arrival]:
        with self._condition:
            taken = list(self._arrivals)
            self._arrivals.clear()
            for arrival in taken:
                arrival.stream.num_queued = 0
            return taken

    def wait(self, timeout_s: float) -> None:
        """Until something is there, at most `timeout_s` seconds."""
        with self._condition:
            if not self._arrivals:
                self._condition.wait(timeout_s)

    def wake(self) -> None:
        with self._condition:
            self._condition.notify()

    def drain(self) -> None:
        """Refuse every opening from now on."""
        with self._condition:
            self._draining = True

    def release(self, num_sessions: int = 0, num_tokens: int = 0) -> None:
        """These do not count any more: sessions that have ended, tokens that have been prefilled or given up."""
        with self._condition:
            self._num_sessions -= num_sessions
            self._num_waiting_tokens -= num_tokens

    def _refusal(self, command: Open) -> Failed | None:
        if self._draining:
            return Failed(command.session_id, FailureCode.DRAINING, "this verifier is going away")
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        if num_tokens > self._context_limit:
            problem = f"prompt and output have {num_tokens} tokens, the context holds {self._context_limit}"
            return Failed(command.session_id, FailureCode.INVALID, problem)
        waiting = self._num_waiting_tokens
        # A prompt above the bound on its own is let in when nothing else waits: it must not starve.
        over = waiting > 0 and waiting + num_tokens > self._max_waiting_tokens
        if self._num_sessions >= self._max_sessions or over:
            return Failed(command.session_id, FailureCode.NO_CAPACITY, "too many requests wait")
        self._num_sessions += 1
        self._num_waiting_tokens += num_tokens
        return None
