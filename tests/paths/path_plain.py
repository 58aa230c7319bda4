"""Plain decoding, which every case is compared with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from moot.core.options import make_config
from moot.core.types import Draft, FinishReason, SamplingParams, TokenLogprobs
from moot.model.backend import plain_runner
from moot.model.loading.load import LoadedModel
from services.verifier.commands import Answer, Failed, Open, Verify
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from tests.paths.path_drawing import TargetSpec

CACHE_TOKENS = 64 * 512


@dataclass(frozen=True)
class Plain:
    """What plain decoding gives a request, if no stop string ends it."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...]


Asked = tuple[Sequence[int], SamplingParams]


class PlainTarget:
    """Plain decoding: an engine of its own, without drafters or shared prompts, that is sent empty drafts only."""

    def __init__(self, loaded: LoadedModel, spec: TargetSpec) -> None:
        config = make_config(VerifierConfig, model=spec.name, max_model_len=spec.max_model_len, prefix_cache_tokens=0)
        self._engine = Engine(plain_runner(loaded, CACHE_TOKENS, True), config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="plain")

    def close(self) -> None:
        self._thread.shutdown()

    async def decode(self, asked: Sequence[Asked]) -> list[Plain]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, asked)

    def _decode(self, asked: Sequence[Asked]) -> list[Plain]:
        inbox: list[Answer] = []
        stream = self._engine.connect(inbox.extend)
        opened = [Open(index, f"plain-{index}", tuple(prompt), params) for index, (prompt, params) in enumerate(asked)]
        self._engine.submit(stream, opened)
        answers: list[list[Any]] = [[] for _ in asked]
        lengths = [len(prompt) for prompt, _ in asked]
        while any(not own or own[-1].finish_reason is None for own in answers):
            self._engine.step()
            arrived, inbox[:] = list(inbox), []
            for answer in arrived:
                if isinstance(answer, Failed):
                    raise RuntimeError(f"plain decoding failed: {answer.message}")
                index, verification = answer.session_id, answer.verification
                answers[index].append(verification)
                lengths[index] += len(verification.output_token_ids)
                if verification.finish_reason is None:
                    command = Verify(index, len(answers[index]), lengths[index], Draft())
                    self._engine.submit(stream, [command])
        self._engine.disconnect(stream)
        self._engine.step()
        return [
            Plain(
                tuple(id_ for one in own for id_ in one.output_token_ids),
                own[-1].finish_reason,
                tuple(entry for one in own for entry in one.logprobs),
            )
            for own in answers
        ]
