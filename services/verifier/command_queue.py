"""The command queue of a verifier and the admission of its commands. Nothing is computed here.

`CommandQueue` is where commands wait for the compute thread: bounded, and quick to say no. Any thread offers; the
compute thread takes at its step boundaries. What can be refused at once (draining, longer than the context, too many
sessions or prompt tokens waiting) is refused by `offer` itself, so that an overloaded verifier answers in no time even
while a step runs.

`CommandAdmission` says what a command means for a session, or why it is refused. A peer is not trusted: whatever it
sends is checked before a token of it reaches the model. A command that does not fit ends its own session (INVALID),
because the two sides no longer agree about it; one that repeats what was already said (a late or doubled command) is
dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moot.core.acceptance import validate_draft
from moot.core.errors import Draining, InvalidRequest, NoCapacity, UnknownSession
from moot.core.history import History
from moot.core.types import FinishReason, ModelInfo, SamplingParams, Verification
from moot.model.cache.kv_cache import KvCache
from services.verifier.commands import Answer, Command, Failed, Open, Opened, Verify
from services.verifier.sessions import AnswerStream, PendingWork, Session


@dataclass(frozen=True, slots=True)
class Arrival:
    """A command on its way to the compute thread. `command` None: the stream has ended."""

    stream: AnswerStream
    command: Command | None
    arrived_ns: int


class CommandQueue:
    """Commands that wait for the compute thread. Opens that were let in count as open sessions, and their tokens as
    waiting ones, until they are released."""

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

    def offer(self, stream: AnswerStream, commands: Sequence[Command]) -> list[Failed]:
        """Queue commands in order; the answers to those refused at once are returned.

        Commands of a stream that is over are dropped: nothing would free what they open. Raises NoCapacity when the
        stream has more commands queued than a working peer ever has: end it.
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

    def end(self, stream: AnswerStream) -> None:
        """End a stream: its sessions are to be aborted. Never refused."""
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
        """Wait until something is there, at most `timeout_s` seconds."""
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
        """Stop counting these: sessions that have ended, tokens that have been prefilled or given up."""
        with self._condition:
            self._num_sessions -= num_sessions
            self._num_waiting_tokens -= num_tokens

    def _refusal(self, command: Open) -> Failed | None:
        if self._draining:
            return Failed(command.session_id, Draining, "this verifier is going away")
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        if num_tokens > self._context_limit:
            problem = f"prompt and output have {num_tokens} tokens, the context holds {self._context_limit}"
            return Failed(command.session_id, InvalidRequest, problem)
        waiting = self._num_waiting_tokens
        # A prompt above the bound on its own is let in when nothing else waits: it must not starve.
        over = waiting > 0 and waiting + num_tokens > self._max_waiting_tokens
        if self._num_sessions >= self._max_sessions or over:
            return Failed(command.session_id, NoCapacity, "too many requests wait")
        self._num_sessions += 1
        self._num_waiting_tokens += num_tokens
        return None


_HINT_BYTES = 16
"""More than a likely token takes in an answer: its id, its log-probability, its share of what surrounds them."""

MOST_CHAINS = 16
"""Most chains of one attached drafter; a command that asks for more gets so many."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A command that is dropped: nothing is answered and nothing changes; counted under `reason`."""

    reason: str


class CommandAdmission:
    """The rules of admission. Sessions are not here but in their streams."""

    def __init__(
        self, info: ModelInfo, max_draft_tokens: int, max_answer_bytes: int, new_cache: Callable[[], KvCache]
    ) -> None:
        self._info = info
        self._max_hints = max_answer_bytes // (_HINT_BYTES * (max_draft_tokens + 1))
        self._max_draft_tokens = max_draft_tokens
        self._new_cache = new_cache
        self._num_opened = 0

    def open(self, stream: AnswerStream, command: Open, arrived_ns: int) -> Session | Answer | Dropped:
        """A session with work, put into its stream; or the answer when there is nothing to compute."""
        if command.session_id in stream.sessions:
            return Dropped("doubled_open")
        if problem := self._problem_of(command):
            return Failed(command.session_id, InvalidRequest, problem)
        self._num_opened += 1
        session = Session(
            stream=stream,
            session_id=command.session_id,
            request_id=command.request_id,
            arrival=self._num_opened,
            token_ids=[*command.prompt_token_ids, *command.output_token_ids],
            num_prompt_tokens=len(command.prompt_token_ids),
            params=command.params,
            ending_token_ids=command.params.ending_token_ids(self._info.end_token_ids),
            context_limit=self._info.context_limit,
            history=History(command.prompt_token_ids, command.output_token_ids),
            cache=self._new_cache(),
            cache_salt=command.cache_salt,
            num_top_candidates=command.num_top_candidates,
            inside_drafter_ids=command.inside_drafter_ids,
            inside_width=min(command.inside_width, MOST_CHAINS),
            num_inside_tokens=min(command.num_inside_tokens, self._max_draft_tokens),
            last_active_ns=arrived_ns,
        )
        if finish := _already_over(session):
            return Opened(command.session_id, Verification(session.length, 0, (), finish))
        session.work = PendingWork.opening(arrived_ns)
        stream.sessions[command.session_id] = session
        return session

    def verify(self, stream: AnswerStream, command: Verify, arrived_ns: int) -> Session | Failed | Dropped:
        """The session with its draft as work; Failed ends it."""
        session = stream.sessions.get(command.session_id)
        if session is None:
            unknown = "no such session: open it again"
            return Failed(command.session_id, UnknownSession, unknown, command.round_index)
        problem: str | None
        if command.round_index <= session.round_index:
            return Dropped("stale_round")
        if session.work is not None:
            problem = "an earlier command of this session is not answered yet"
        elif command.base_length != session.length:
            problem = f"base_length is {command.base_length}, but {session.length} tokens are committed here"
        else:
            problem = validate_draft(command.draft, self._info.vocab_size, self._max_draft_tokens)
        if problem is not None:
            return Failed(command.session_id, InvalidRequest, problem, command.round_index)
        session.round_index = command.round_index
        session.last_active_ns = arrived_ns
        session.num_inside_tokens = min(command.num_inside_tokens, self._max_draft_tokens)
        session.work = PendingWork.verification(command.draft, session.max_new, command.round_index, arrived_ns)
        return session

    def _problem_of(self, command: Open) -> str | None:
        vocab_size = self._info.vocab_size
        if not command.prompt_token_ids:
            return "the prompt is empty"
        for token_ids in (command.prompt_token_ids, command.output_token_ids):
            if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < vocab_size:
                return f"a token id is outside the vocabulary of {vocab_size}"
        if (command.params.logprobs or 0) + command.num_top_candidates > self._max_hints:
            return f"logprobs and top candidates must be at most {self._max_hints} together: an answer is one message"
        return problem_of_params(command.params, vocab_size)


def problem_of_params(params: SamplingParams, vocab_size: int) -> str | None:
    """Why no sampler can work with these parameters, or None. The router refuses more, and says it better."""
    at_least_zero = {"temperature": params.temperature, "top_k": params.top_k, "min_tokens": params.min_tokens}
    finite = {"presence_penalty": params.presence_penalty, "frequency_penalty": params.frequency_penalty}
    for name, value in (at_least_zero | finite).items():
        if not math.isfinite(value) or (name in at_least_zero and value < 0):
            return f"{name} is out of range"
    for name, value in {"top_p": params.top_p, "min_p": params.min_p}.items():
        if not 0 <= value <= 1:
            return f"{name} must be from 0 to 1"
    if not (math.isfinite(params.repetition_penalty) and params.repetition_penalty > 0):
        return "repetition_penalty must be above 0"
    if not all(math.isfinite(bias) for bias in params.logit_bias.values()):
        return "logit_bias must be finite"
    if params.max_tokens < 1:
        return "max_tokens must be at least 1"
    if params.logprobs is not None and not 0 <= params.logprobs <= vocab_size:
        return f"logprobs must be from 0 to {vocab_size}"
    return None


def _already_over(session: Session) -> FinishReason | None:
    """Whether the request is over already: it may be opened anew after it has committed its last token."""
    is_end = session.num_output_tokens > 0 and session.token_ids[-1] in session.ending_token_ids
    # Before min_tokens the ids that end were masked, so such an id can only be there when it did end the request.
    if is_end:
        return FinishReason.STOP
    return FinishReason.LENGTH if session.max_new <= 0 else None
