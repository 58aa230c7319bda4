"""Plain decoding against an oracle that shares no code with it: transformers without a cache, and plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import transformers

from moot.core.sampling import sample_token, token_logprobs
from moot.core.types import Draft, FinishReason, SamplingParams, TokenLogprobs
from moot.testing.tiny_model import FAMILIES
from tests.services.verifier.verifier_driver import MakeEngine, Text, assert_logprobs, play, run, texts

VOCAB_SIZE = 259
END_TOKEN_ID = 258

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, max_tokens=24, seed=1, logprobs=0),
    SamplingParams(temperature=1.2, top_k=40, top_p=0.9, min_p=0.01, max_tokens=16, seed=2**63 + 5),
    SamplingParams(
        temperature=0.7,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias={END_TOKEN_ID: 9.0, 5: 3.0},
        min_tokens=9,
        max_tokens=30,
        seed=3,
        logprobs=2,
    ),
]


class Oracle:
    """The whole text goes through the model for every token; numbers are picked by the reference sampler."""

    def __init__(self, folder: Path, dtype: str) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> list[float]:
        return self.model(torch.tensor([list(token_ids)]), use_cache=False).logits[0, -1, :VOCAB_SIZE].tolist()

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> tuple[Text, list[TokenLogprobs]]:
        output: list[int] = []
        logprobs = []
        ends = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | {END_TOKEN_ID}
        while True:
            row = self.logits([*prompt, *output])
            position = len(prompt) + len(output)
            token_id = sample_token(row, params, position, prompt, output, frozenset({END_TOKEN_ID}))
            output.append(token_id)
            if params.logprobs is not None:
                logprobs.append(token_logprobs(row, token_id, params.logprobs))
            if token_id in ends:
                return (tuple(output), FinishReason.STOP), logprobs
            if len(output) == params.max_tokens:
                return (tuple(output), FinishReason.LENGTH), logprobs


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_equals_the_oracle(
    make_engine: MakeEngine, model_folder: Callable[..., Path], family: str, dtype: str
) -> None:
    """C07, C16: ids, end reasons and log-probabilities (of raw logits, the vocabulary's padding left out) are the
    oracle's, for every family; chunks of 8."""
    oracle = Oracle(model_folder(family, dtype), dtype)
    prompts = [[3], list(range(40, 71)), [7, 7, 7, 250]]
    engine = make_engine(family, dtype, prefill_chunk_tokens=8)
    jobs = [(prompt, params) for prompt in prompts for params in PARAMS]
    results = run(engine, [play(prompt, params) for prompt, params in jobs])
    for (prompt, params), result in zip(jobs, results, strict=True):
        text, logprobs = oracle.generate(prompt, params)
        assert texts([result]) == [text]
        assert_logprobs(result.logprobs, logprobs, 1e-4)


def test_after_a_rejection_at_every_position_the_logits_are_those_of_a_fresh_pass(
    make_engine: MakeEngine, model_folder: Callable[..., Path]
) -> None:
    """Cache rollback (C05): 100 rounds with a rejection forced at each position 0..K in turn, chain and tree; then all
    log-probabilities equal a forward pass without a cache."""
    oracle = Oracle(model_folder("llama", "float64"), "float64")
    engine = make_engine()
    prompt, k = [5, 6, 7], 4
    params = SamplingParams(temperature=0.0, max_tokens=320, ignore_eos=True, logprobs=2)
    (plain,) = run(engine, [play(prompt, params)])
    rounds = 0

    def reject(output: tuple[int, ...]) -> Draft:
        nonlocal rounds
        at, rounds = rounds % (k + 1), rounds + 1
        true = list(plain.output_token_ids[len(output) : len(output) + k])
        if at < len(true):
            true[at] = (true[at] + 1) % 256
        if rounds % 2 and at < len(true):
            # The same as a tree: the wrong branch first, then the true one cut short.
            return Draft((200, *true), (-1, -1, *range(1, len(true))))
        return Draft.chain(tuple(true))

    (drafted,) = run(engine, [play(prompt, params, reject)])
    assert rounds >= 100
    assert drafted.output_token_ids == plain.output_token_ids
    assert {one.num_accepted for one in drafted.verifications} >= set(range(k + 1))
    places, ids = range(0, 320, 13), drafted.output_token_ids
    expected = [token_logprobs(oracle.logits([*prompt, *ids[:place]]), ids[place], 2) for place in places]
    assert_logprobs([drafted.logprobs[place] for place in places], expected, 1e-5)
