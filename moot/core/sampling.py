"""The one sampler in plain Python on lists of floats: the reference that every faster version must equal, id by id.

    token(t) = argmax over allowed x of  logp(x) + G(seed, t, x)        ties: the lowest id

By the Gumbel-max identity its law is exactly softmax(logp), whatever was drafted. Two choices keep the result the same
on every device, where exp, log and the order of a sum differ in the last bit:

- top-p adds weights exp(logit - highest) rounded to multiples of a power of two so small that all sums below 2^53 such
  units are exact in float64. A sum is then the same in any order, and equal logits always weigh the same. The rounding
  moves the nucleus's mass by less than 1e-6.
- min-p compares logit - highest with log(min_p), instead of probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from moot.core.errors import RequestPoisoned
from moot.core.noise import gumbel
from moot.core.types import SamplingParams, TokenLogprobs

MASKED = -math.inf


def sample_token(
    logits: Sequence[float],
    params: SamplingParams,
    position: int,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    end_token_ids: frozenset[int] = frozenset(),
    grammar_allowed: Collection[int] | None = None,
) -> int:
    """The token at absolute `position`. `logits`: one value per id of the tokenizer's vocabulary, nothing padded.

    `output_token_ids`: committed output, then the draft tokens before this position on this path.
    Raises RequestPoisoned when a logit is NaN or +inf, or when no allowed one is finite.
    """
    processed = process_logits(logits, params, prompt_token_ids, output_token_ids, end_token_ids, grammar_allowed)
    if params.is_greedy:
        return max(range(len(processed)), key=lambda token_id: (processed[token_id], -token_id))
    scaled = filter_logits(processed, params)
    # The log-softmax constant is the same for every id: left out, it cannot round two scores together.
    scores = [
        (logit + gumbel(params.seed, position, token_id), -token_id)
        for token_id, logit in enumerate(scaled)
        if logit != MASKED
    ]
    return -max(scores)[1]


def process_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    end_token_ids: frozenset[int] = frozenset(),
    grammar_allowed: Collection[int] | None = None,
) -> list[float]:
    """Everything before temperature: bias, allowed ids, penalties, grammar mask, min_tokens mask, in this order.

    Biased ids outside the vocabulary have no logit and are passed over, as are seen ids in penalties.
    """
    if any(math.isnan(logit) or logit == math.inf for logit in logits):
        raise RequestPoisoned("the model's logits are not finite")
    result = [float(logit) for logit in logits]
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < len(result):
            result[token_id] += bias
    if params.allowed_token_ids is not None:
        result = _keep_only(result, params.allowed_token_ids)
    if params.has_penalties:
        for token_id in {*prompt_token_ids, *output_token_ids}:
            if 0 <= token_id < len(result):
                result[token_id] = penalise(result[token_id], output_token_ids.count(token_id), params)
    if grammar_allowed is not None:
        result = _keep_only(result, grammar_allowed)
    if len(output_token_ids) < params.min_tokens:
        ending = params.ending_token_ids(end_token_ids)
        result = [MASKED if token_id in ending else logit for token_id, logit in enumerate(result)]
    if not math.isfinite(max(result, default=MASKED)):
        raise RequestPoisoned("no allowed token has a finite logit")
    return result


def penalise(logit: float, output_count: int, params: SamplingParams) -> float:
    """`logit` of an id seen in prompt or output, `output_count` times in the output.

    Repetition divides positive logits and multiplies the others (Keskar et al., 2019), so that both move down;
    frequency and presence subtract, as in OpenAI's API.
    """
    logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
    logit -= params.frequency_penalty * output_count
    return logit - params.presence_penalty if output_count > 0 else logit


def filter_logits(processed: Sequence[float], params: SamplingParams) -> list[float]:
    """Temperature, top-k, top-p, min-p: logits relative to the highest, MASKED where filtered out."""
    highest = max(processed)
    # Subtracted before the division: a very small temperature then underflows to MASKED instead of overflowing.
    scaled = [(logit - highest) / params.temperature for logit in processed]
    # By logit descending, then id ascending: equal logits are common in bfloat16.
    order = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        order = nucleus(order, scaled, params.top_p)
    if params.min_p > 0.0:
        lowest = math.log(params.min_p)
        order = [token_id for token_id in order if scaled[token_id] >= lowest]
    kept = set(order)
    return [logit if token_id in kept else MASKED for token_id, logit in enumerate(scaled)]


def nucleus(order: Sequence[int], scaled: Sequence[float], top_p: float) -> list[int]:
    """The shortest beginning of `order` that holds at least the share `top_p` of the mass of `order`."""
    bits = weight_bits(len(scaled))
    weights = [math.floor(math.exp(scaled[token_id]) * 2.0**bits + 0.5) for token_id in order]
    target = top_p * float(sum(weights))
    cumulated = 0.0
    for length, weight in enumerate(weights, start=1):
        cumulated += weight
        if cumulated >= target:
            return list(order[:length])
    return list(order)


def weight_bits(vocab_size: int) -> int:
    """Weights of top-p are multiples of 2^-bits: the most bits with which the sum of a whole row is exact."""
    return 53 - vocab_size.bit_length()


def log_probs(
    logits: Sequence[float],
    params: SamplingParams,
    prompt_token_ids: Sequence[int] = (),
    output_token_ids: Sequence[int] = (),
    end_token_ids: frozenset[int] = frozenset(),
) -> list[float]:
    """logp(x) of the sampler at temperature > 0: the natural logarithm of the law of the next token."""
    processed = process_logits(logits, params, prompt_token_ids, output_token_ids, end_token_ids)
    scaled = filter_logits(processed, params)
    log_total = math.log(math.fsum(math.exp(logit) for logit in scaled))
    return [logit - log_total for logit in scaled]


def token_logprobs(logits: Sequence[float], token_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the raw logits, before bias, penalties and temperature. Same errors as `sample_token`."""
    process_logits(logits, SamplingParams(), (), ())
    highest = max(logits)
    log_total = highest + math.log(math.fsum(math.exp(logit - highest) for logit in logits))
    order = sorted(range(len(logits)), key=lambda other: (-logits[other], other))
    top = tuple((other, logits[other] - log_total) for other in order[:num_top])
    return TokenLogprobs(logits[token_id] - log_total, order.index(token_id) + 1, top)


def _keep_only(logits: Sequence[float], allowed: Collection[int]) -> list[float]:
    return [logit if token_id in allowed else MASKED for token_id, logit in enumerate(logits)]
