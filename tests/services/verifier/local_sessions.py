"""An engine in this process, used like a function: for tests, benchmarks and recording.

Each `LocalSession` call waits for its answer, at most `timeout_s`. Many sessions may run from many threads at once.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from moot.core.errors import DeadlineExceeded
from moot.core.types import Draft, FinishReason, SamplingParams, TokenLogprobs, Verification
from services.verifier.commands import Abort, Answer, Failed, Open, Verify
from services.verifier.engine import Engine

_session_ids = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Generated:
    """One whole output. `verifications`: the opening, then one per round."""

    output_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...]
    verifications: tuple[Verification, ...]


class LocalSession:
    """A session on `engine` with a stream of its own. A context manager: leaving it frees everything."""

    def __init__(
        self,
        engine: Engine,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
        *,
        request_id: str = "local",
        cache_salt: str = "",
        num_top_candidates: int = 0,
        inside_drafter_ids: Sequence[str] = (),
        inside_width: int = 1,
        num_inside_tokens: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """`num_inside_tokens`: asked of the drafters attached to the verifier with every command."""
        self.session_id = next(_session_ids)
        self.length = len(prompt_token_ids) + len(output_token_ids)
        self._engine = engine
        self._timeout_s = timeout_s
        self._round_index = 0
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._stream = engine.connect(self._receive)
        self._command = Open(
            self.session_id,
            request_id,
            tuple(prompt_token_ids),
            params,
            tuple(output_token_ids),
            cache_salt,
            num_top_candidates,
            tuple(inside_drafter_ids),
            inside_width,
            num_inside_tokens,
        )

    def __enter__(self) -> LocalSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def open(self) -> Verification:
        """Prefill and first token. Raises the error that the failure code stands for, or DeadlineExceeded."""
        self._engine.submit(self._stream, [self._command])
        return self._answer()

    def verify(self, draft: Draft = Draft()) -> Verification:  # noqa: B008 - a frozen value
        """One round. Same errors as `open`."""
        self._round_index += 1
        wanted = self._command.num_inside_tokens
        self._engine.submit(self._stream, [Verify(self.session_id, self._round_index, self.length, draft, wanted)])
        return self._answer()

    def abort(self) -> None:
        self._engine.submit(self._stream, [Abort(self.session_id)])

    def close(self) -> None:
        self._engine.disconnect(self._stream)

    def _receive(self, answers: Sequence[Answer]) -> None:
        for answer in answers:
            self._answers.put(answer)

    def _answer(self) -> Verification:
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"the engine did not answer within {self._timeout_s:g} s") from None
        if isinstance(answer, Failed):
            raise answer.error(answer.message)
        self.length += len(answer.verification.output_token_ids)
        return answer.verification


def generate(
    engine: Engine,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    draft_of: Callable[[tuple[int, ...]], Draft],
    *,
    output_token_ids: Sequence[int] = (),
    timeout_s: float = 60.0,
) -> Generated:
    """Rounds until the request ends; `draft_of` makes the draft that follows the given output ids."""
    output = tuple(output_token_ids)
    verifications: list[Verification] = []
    with LocalSession(engine, prompt_token_ids, params, output, timeout_s=timeout_s) as session:
        while True:
            answer = session.verify(draft_of(output)) if verifications else session.open()
            verifications.append(answer)
            output += answer.output_token_ids
            if answer.finish_reason is not None:
                logprobs = tuple(entry for one in verifications for entry in one.logprobs)
                return Generated(output, answer.finish_reason, logprobs, tuple(verifications))


def plain_generate(
    engine: Engine, prompt_token_ids: Sequence[int], params: SamplingParams, *, timeout_s: float = 60.0
) -> Generated:
    """Plain decoding: rounds with an empty draft (K = 0) through the same code as every other round."""
    return generate(engine, prompt_token_ids, params, lambda _: Draft(), timeout_s=timeout_s)
