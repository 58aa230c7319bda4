"""The target's own texts, by the runner and the sampler that a verifier has: no drafts, many rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from moot.core.acceptance import walk
from moot.core.errors import InvalidRequest
from moot.core.history import History
from moot.core.types import Draft, FinishReason, SamplingParams
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.model.sampling.sampler import Sampler, likeliest

CHUNK_TOKENS = 256
"""Of a prompt read at a time."""


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    output_token_ids: tuple[int, ...]
    top_candidates: tuple[tuple[int, ...], ...]
    finish_reason: FinishReason


@dataclass(slots=True)
class _Row:
    index: int
    cache: KvCache
    params: SamplingParams
    ends: frozenset[int]
    unread: list[int]
    """Ids that the cache does not hold yet."""
    history: History
    length: int
    """Prompt plus output."""
    output: list[int] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)


class RecordedTarget:
    """Texts of one loaded model. In batch-invariant mode they are what a verifier in batch-invariant mode says."""

    def __init__(self, runner: ModelRunner, num_candidates: int) -> None:
        """`num_candidates`: likeliest ids to keep per place."""
        self._runner = runner
        self._num_candidates = min(num_candidates, runner.info.vocab_size)
        self._sampler = Sampler(runner.info.vocab_size, runner.info.end_token_ids)

    def answers(
        self, asked: Sequence[tuple[Sequence[int], SamplingParams]], num_rows: int, on_token: Callable[[], None]
    ) -> Iterator[tuple[int, TargetAnswer]]:
        """(index, answer) of each (prompt ids, parameters) as they end; `num_rows` of them at a time.

        `on_token` is called for each token made. Raises InvalidRequest for a prompt that leaves no room in the context.
        """
        waiting = list(enumerate(asked))[::-1]
        rows: list[_Row] = []
        while waiting or rows:
            while waiting and len(rows) < num_rows:
                index, (prompt, params) = waiting.pop()
                rows.append(self._open(index, prompt, params))
            yield from self._step(rows, on_token)

    def _open(self, index: int, prompt: Sequence[int], params: SamplingParams) -> _Row:
        if not 0 < len(prompt) < self._runner.info.context_limit:
            raise InvalidRequest(f"a prompt of {len(prompt)} tokens leaves no room in the context")
        ends = params.ending_token_ids(self._runner.info.end_token_ids)
        return _Row(index, self._runner.new_cache(), params, ends, list(prompt), History(prompt), len(prompt))

    def _step(self, rows: list[_Row], on_token: Callable[[], None]) -> Iterator[tuple[int, TargetAnswer]]:
        """One token for every row whose prompt is read, and a part of the prompt for one that is not."""
        reading = next((row for row in rows if len(row.unread) > CHUNK_TOKENS), None)
        inputs: list[SequenceInput] = []
        taken: list[_Row] = []
        for row in rows:
            if row is reading:
                inputs.append(SequenceInput(row.cache, row.unread[:CHUNK_TOKENS]))
            elif len(row.unread) <= CHUNK_TOKENS:
                inputs.append(SequenceInput(row.cache, row.unread, None, (len(row.unread) - 1,)))
            else:
                continue
            taken.append(row)
        for row, item, logits in zip(taken, inputs, self._runner.forward(inputs), strict=True):
            row.cache.commit(range(len(item.token_ids)))
            row.unread = row.unread[len(item.token_ids) :]
            if not item.logit_rows:
                continue
            found = self._advance(row, logits)
            on_token()
            if found is not None:
                row.cache.free()
                rows.remove(row)
                yield row.index, found

    def _advance(self, row: _Row, logits: Tensor) -> TargetAnswer | None:
        room = min(row.params.max_tokens - len(row.output), self._runner.info.context_limit - row.length)
        walked = walk(
            Draft(),
            lambda node, path: self._sampler.sample(logits[0], row.params, row.length, row.history),
            lambda token, _: token in row.ends,
            room,
        )
        row.candidates += self._likeliest(logits)
        row.output += walked.output_token_ids
        row.history.append(walked.output_token_ids)
        row.length += 1
        row.unread = list(walked.output_token_ids)
        if walked.finish is None:
            return None
        return TargetAnswer(tuple(row.output), tuple(row.candidates), walked.finish)

    def _likeliest(self, logits: Tensor) -> list[tuple[int, ...]]:
        if not self._num_candidates:
            return []
        return likeliest(logits[:, : self._runner.info.vocab_size], self._num_candidates)

    def look(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
    ) -> tuple[tuple[tuple[int, ...], ...], int]:
        """The likeliest ids at every place of a text that is known, and at how many leading places this target says
        the same: all of them, where the text is its own and batch-invariant mode holds on both sides."""
        cache = self._runner.new_cache()
        ids = [*prompt, *output[:-1]]
        history = History(prompt)
        candidates: list[tuple[int, ...]] = []
        same, parted = 0, False
        try:
            for start in range(0, len(ids), CHUNK_TOKENS):
                chunk = ids[start : start + CHUNK_TOKENS]
                wanted = range(max(len(prompt) - 1 - start, 0), len(chunk))
                (logits,) = self._runner.forward([SequenceInput(cache, chunk, None, wanted)])
                cache.commit(range(len(chunk)))
                candidates += self._likeliest(logits)
                for row, place in enumerate(wanted):
                    number = start + place + 1 - len(prompt)
                    said = self._sampler.sample(logits[row], params, start + place + 1, history)
                    parted = parted or said != output[number]
                    same += not parted
                    history.append(output[number : number + 1])
        finally:
            cache.free()
        return tuple(candidates), same


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:
    """A question as the router encodes it: in the model's chat template, or bare where it has none."""
    if tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            sanitize_control_tokens=True,
        )
    else:
        ids = tokenizer(text)["input_ids"]
    return tuple(int(id_) for id_ in ids)
