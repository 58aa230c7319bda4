"""Streams to an engine in this process, and sessions used like functions: each call waits for its answer."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

from moot.core.types import Draft, SamplingParams, Verification
from services.verifier.commands import Answer, Command, Failed, Open, Verify
from services.verifier.engine import Engine
from tests.services.verifier.verifier_driver import session_ids
from tests.waiting import GIVE_UP_S


class Talk:
    """One stream to an engine that the test steps. `answers`: all that came. A context manager: it leaves nothing."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answers: list[Answer] = []
        self.stream = engine.connect(self.answers.extend)

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.disconnect(self.stream)
        self.engine.step()

    def send(self, *commands: Command) -> None:
        self.engine.submit(self.stream, commands)

    def ask(self, *commands: Command) -> list[Answer]:
        """Send, and step until nothing can be computed; the answers that came."""
        before = len(self.answers)
        self.send(*commands)
        while self.engine.step():
            pass
        return self.answers[before:]


def talk(engine: Engine, *commands: Command) -> list[Answer]:
    """Answers to commands sent one after another on one stream, which is closed afterwards."""
    with Talk(engine) as stream:
        return [answer for command in commands for answer in stream.ask(command)]


def verified(answers: Iterable[Answer]) -> list[Verification]:
    """What answers, none of which is a failure, have to say."""
    found = []
    for answer in answers:
        assert not isinstance(answer, Failed), answer
        found.append(answer.verification)
    return found


class LocalSession:
    """A session with a stream of its own, on an engine that runs, beside others on other threads, or that is stepped
    here. A context manager: leaving it frees everything."""

    def __init__(self, engine: Engine, prompt_token_ids: Sequence[int], params: SamplingParams, **fields: Any) -> None:
        """`fields`: further ones of `Open`. `num_inside_tokens` is asked for with every command."""
        self._engine = engine
        self._opening = Open(next(session_ids), "local", tuple(prompt_token_ids), params, **fields)
        self._length = len(prompt_token_ids)
        self._num_rounds = 0
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._stream = engine.connect(self._receive)

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.disconnect(self._stream)

    def open(self) -> Verification:
        """Prefill and first token. Raises the error that the failure code stands for."""
        return self._ask(self._opening)

    def verify(self, draft: Draft = Draft()) -> Verification:  # noqa: B008 - a frozen value
        """One round. Same errors as `open`."""
        self._num_rounds += 1
        wanted = self._opening.num_inside_tokens
        return self._ask(Verify(self._opening.session_id, self._num_rounds, self._length, draft, wanted))

    def _receive(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._answers.put(answer)

    def _ask(self, command: Open | Verify) -> Verification:
        self._engine.submit(self._stream, [command])
        while not self._engine.is_running and self._answers.empty():
            self._engine.step()
        answer = self._answers.get(timeout=GIVE_UP_S)
        if isinstance(answer, Failed):
            raise answer.error(answer.message)
        self._length += len(answer.verification.output_token_ids)
        return answer.verification
