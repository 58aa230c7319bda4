"""The one sampler on tensors: `moot.core.sampling`, id by id, at a cost that a decoding step does not feel.

Nearly no token of a vocabulary can win, and the exact noise is computed only for those that can. With s <= 0 the scaled
logit relative to the highest, G = -log(-log u) and B the score of any one token, x wins only if s + G >= B, that is
-log u <= exp(s - B). As -log u >= 1 - u, it needs (1 - u) * exp(-s) <= exp(-B). The left side costs one
single-precision pass over the row; the token where it is lowest gives a B so near the best score that a handful of
tokens are left. u lies on multiples of 2^-33 from 2^-33 to 1 - 2^-33: noise ends at 33 ln 2 = 22.9 nats and begins at
-log(33 ln 2) = -3.1, so a token more than NOISE_RANGE = 26.0 nats below the highest has always lost, and for the others
nothing above overflows single precision or vanishes.

`likeliest` finds the likeliest ids of a row of logits, as hints for drafters that use them: no token depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from moot.core.errors import RequestPoisoned
from moot.core.history import History, HistoryOnPath
from moot.core.noise import NOISE_RANGE
from moot.core.sampling import MASKED
from moot.core.types import SamplingParams, TokenLogprobs
from moot.model.sampling.logits import (
    add_bias,
    add_penalties,
    first_highest,
    first_highest_rows,
    gumbel,
    indices_where,
    min_p_indices,
    one_minus_uniform,
    only,
    top_k_indices,
    top_p_indices,
)

_BLOCK = 64


def likeliest(logits: Tensor, width: int) -> list[tuple[int, ...]]:
    """The ids of the `width` highest logits of each row of `logits` [rows, vocab], highest first.

    The blocks with the `width` highest maxima hold them all, so that only those are sorted: torch's selection over the
    whole of a large vocabulary takes many times as long.
    """
    rows, size = logits.shape
    width = min(width, size)
    if size <= width * _BLOCK:
        return list(map(tuple, logits.topk(width, dim=1).indices.tolist()))
    if size % _BLOCK:
        logits = functional.pad(logits, (0, -size % _BLOCK), value=-torch.inf)
    blocks = logits.reshape(rows, -1, _BLOCK)
    best = blocks.amax(2).topk(width, dim=1).indices
    values = blocks.gather(1, best[:, :, None].expand(-1, -1, _BLOCK)).view(rows, -1)
    places = values.topk(width, dim=1).indices
    ids = best.gather(1, places // _BLOCK) * _BLOCK + places % _BLOCK
    # Where a row has fewer finite logits than asked for, padding ties with what is masked.
    return list(map(tuple, ids.clamp_(max=size - 1).tolist()))


__all__ = ["History", "HistoryOnPath", "Sampler"]

EXACT_AT_ONCE = 512
"""For this few tokens the exact noise of all costs less than finding out which can win."""

SCREEN_SLACK = 1e-4
"""Relative. Covers the single-precision error of the screen: |s| 2^-23 from rounding s, |s| < 27, and a few ulp."""

MAX_CACHED_ID_SETS = 64


def has_rules(params: SamplingParams, num_output: int) -> bool:
    """Whether a row is processed before temperature."""
    return (
        bool(params.logit_bias)
        or params.allowed_token_ids is not None
        or params.has_penalties
        or num_output < params.min_tokens
    )


class Sampler:
    """Samples from rows of logits of one model. Holds no state of any request; not thread-safe.

    `vocab_size` is the tokenizer's: logits at or above it are padding and never read. Rows are floating tensors
    [vocab_padded] on any device; a row that is NaN, +inf or without a finite allowed logit raises RequestPoisoned.
    """

    def __init__(self, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids
        self._ids = torch.arange(vocab_size)
        self._id_sets: dict[tuple[frozenset[int], torch.device], Tensor] = {}

    def needs_row(self, params: SamplingParams, num_output: int) -> bool:
        """Whether a token must come from `sample`: false where it is the highest raw logit (`greedy_rows`)."""
        return not params.is_greedy or has_rules(params, num_output)

    def greedy_rows(self, logits: Tensor) -> list[int | None]:
        """For each row of `logits` [rows, vocab_padded] the lowest id of its highest logit, None for a poisoned row."""
        rows = logits[:, : self.vocab_size]
        ids = first_highest_rows(rows)
        finite = rows.gather(1, ids[:, None])[:, 0].isfinite()
        pairs = zip(ids.tolist(), finite.tolist(), strict=True)
        return [token_id if is_finite else None for token_id, is_finite in pairs]

    def sample(
        self,
        logits: Tensor,
        params: SamplingParams,
        position: int,
        history: History | HistoryOnPath,
    ) -> int:
        """The token at absolute `position`, from one row [vocab_padded].

        `history` holds prompt, committed output and the draft tokens before this position on this path.
        """
        row = self._processed(logits, params, history)
        return self._choose(row, params, position, params.temperature)

    def draft_token(
        self,
        logits: Tensor,
        params: SamplingParams,
        position: int,
        history: History | HistoryOnPath | None = None,
        sharpen: float = 1.0,
    ) -> int:
        """A drafter's choice from its own row, by the target's rule and noise, so that both mostly agree.

        Without `history` penalties and min_tokens are left out. `sharpen` multiplies the logits after processing
        (divides the temperature): above 1 helps weak drafters. The target's text depends on none of this.
        """
        row = self._processed(logits, params, history)
        return self._choose(row, params, position, params.temperature / sharpen)

    def draft_scores(
        self,
        logits: Tensor,
        params: SamplingParams,
        position: int,
        history: History | HistoryOnPath | None = None,
        sharpen: float = 1.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The scores that `draft_token` chooses from, for drafters that go on with several: ids (int64 ascending),
        their scaled logits, and the scores whose highest it takes; each [n]. Greedy: both are the processed logits."""
        row = self._processed(logits, params, history)
        highest = _highest(row)
        if params.is_greedy:
            return self._all_ids(row.device), row, row
        ids, scaled = self._kept(row, highest, params, params.temperature / sharpen)
        able = indices_where(scaled >= -NOISE_RANGE)
        ids, scaled = ids[able], scaled[able]
        return ids, scaled, scaled + gumbel(params.seed, position, ids)

    def draft_tokens(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        histories: Sequence[History | HistoryOnPath | None],
        sharpen: float = 1.0,
    ) -> list[int | None]:
        """`draft_token` for each row [rows, vocab_padded], of one request each; None for a poisoned row."""
        result = self.greedy_rows(logits)
        for index, (row_params, position, history) in enumerate(zip(params, positions, histories, strict=True)):
            if result[index] is None or not self.needs_row(row_params, 0 if history is None else history.num_output):
                continue
            try:
                result[index] = self.draft_token(logits[index], row_params, position, history, sharpen)
            except RequestPoisoned:
                result[index] = None
        return result

    def logprobs(self, logits: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
        """Natural log-probabilities of the raw row [vocab_padded]: of `token_id`, and of the `num_top` likeliest ids.

        Rank: ids with a higher logit, and lower ids with an equal one, plus 1.
        """
        row = logits[: self.vocab_size]
        highest = _highest(row)
        log_total = highest + math.log(float((row.to(torch.float64) - highest).exp_().sum()))
        logit = row[token_id]
        rank = int((row > logit).sum()) + int((row[:token_id] == logit).sum()) + 1
        top: list[tuple[int, float]] = []
        if num_top > 0:
            ids = top_k_indices(row, num_top)
            values, order = torch.sort(row[ids], descending=True, stable=True)
            top = list(zip(ids[order].tolist(), (values.to(torch.float64) - log_total).tolist(), strict=True))
        return TokenLogprobs(float(logit) - log_total, rank, tuple(top))

    def probabilities(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Softmax probability of `token_ids[i]` in row i of [rows, vocab_padded]: a drafter's confidence."""
        rows = logits[:, : self.vocab_size].to(torch.float32)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=rows.device)[:, None]
        chosen: list[float] = (rows.gather(1, ids)[:, 0] - rows.logsumexp(dim=1)).exp().tolist()
        return chosen

    def _processed(self, logits: Tensor, params: SamplingParams, history: History | HistoryOnPath | None) -> Tensor:
        """The row after everything before temperature; float64 where anything changed, else as it came."""
        raw = logits[: self.vocab_size]
        _highest(raw)
        row = raw
        if params.logit_bias:
            row = row.to(torch.float64, copy=True)
            add_bias(row, params.logit_bias)
        if params.allowed_token_ids is not None:
            row = only(row, self._id_tensor(params.allowed_token_ids, row.device))
        if history is not None and params.has_penalties:
            row = row.to(torch.float64, copy=True)
            add_penalties(row, params, history)
        if history is not None and history.num_output < params.min_tokens:
            ending = self._id_tensor(params.ending_token_ids(self.end_token_ids), row.device)
            row = row.index_fill(0, ending, MASKED)
        return row

    def _choose(self, row: Tensor, params: SamplingParams, position: int, temperature: float) -> int:
        highest = _highest(row)
        if params.is_greedy:
            return first_highest(row)
        return _noisy_highest(*self._kept(row, highest, params, temperature), params.seed, position)

    def _kept(self, row: Tensor, highest: float, params: SamplingParams, temperature: float) -> tuple[Tensor, Tensor]:
        """Ids that the filters leave, int64 ascending, and their logits over temperature, float64, the highest 0."""
        scaled = row.to(torch.float64, copy=True).sub_(highest).div_(temperature)
        ids = self._all_ids(row.device)
        if params.top_k > 0:
            kept = top_k_indices(scaled, params.top_k)
            ids, scaled = kept, scaled[kept]
        if params.top_p < 1.0:
            kept = top_p_indices(scaled, params.top_p, self.vocab_size)
            ids, scaled = ids[kept], scaled[kept]
        if params.min_p > 0.0:
            kept = min_p_indices(scaled, params.min_p)
            ids, scaled = ids[kept], scaled[kept]
        return ids, scaled

    def _all_ids(self, device: torch.device) -> Tensor:
        if self._ids.device != device:
            self._ids = torch.arange(self.vocab_size, device=device)
        return self._ids

    def _id_tensor(self, token_ids: frozenset[int], device: torch.device) -> Tensor:
        """Ids of the set inside the vocabulary, int64 on `device`. The last sets are remembered: they may be large."""
        key = (token_ids, device)
        if key not in self._id_sets:
            while len(self._id_sets) >= MAX_CACHED_ID_SETS:
                del self._id_sets[next(iter(self._id_sets))]
            attached = sorted(token_id for token_id in token_ids if 0 <= token_id < self.vocab_size)
            self._id_sets[key] = torch.tensor(attached, dtype=torch.int64, device=device)
        return self._id_sets[key]


def _highest(row: Tensor) -> float:
    """The highest logit; RequestPoisoned when it is not finite (max hands NaN on)."""
    highest = float(row.max()) if row.numel() else MASKED
    if not math.isfinite(highest):
        raise RequestPoisoned(
            "no allowed token has a finite logit" if highest == MASKED else "the model's logits are not finite"
        )
    return highest


def _noisy_highest(ids: Tensor, scaled: Tensor, seed: int, position: int) -> int:
    """argmax of scaled + noise over `ids` (int64 ascending), the lowest id in a tie. `scaled`: float64, highest 0."""
    if ids.numel() > EXACT_AT_ONCE:
        odds_against = one_minus_uniform(seed, position, ids).mul_(scaled.to(torch.float32).neg_().exp_())
        likely = odds_against.argmin()
        score = float(scaled[likely] + gumbel(seed, position, ids[likely]))
        able = indices_where(odds_against <= math.exp(-score) * (1.0 + SCREEN_SLACK))
        ids, scaled = ids[able], scaled[able]
    return int(ids[first_highest(scaled + gumbel(seed, position, ids))])
