"""The one sampler on tensors: `moot.core.sampling`, id by id, at a cost that a decoding step does not feel.

Only tokens near the highest logit can win. The noise of 32-bit hashes lies between LOWEST_NOISE = -log(33 ln 2) and
HIGHEST_NOISE = 33 ln 2 (u is a multiple of 2^-33 between 2^-33 and 1 - 2^-33). The token with the highest logit, 0
after scaling, scores at least LOWEST_NOISE, and a token at scaled logit s at most s + HIGHEST_NOISE: with
s < LOWEST_NOISE - HIGHEST_NOISE = -NOISE_RANGE it has lost. Nothing is computed for such tokens. They are a tail of
the order on which the filters work, so top-k and min-p choose the same among the others; for top-p the limit is moved
down to where weights round to zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from moot.core.errors import RequestPoisoned
from moot.core.history import History, HistoryOnPath
from moot.core.noise import HIGHEST_NOISE, NOISE_RANGE
from moot.core.sampling import MASKED, weight_bits
from moot.core.types import SamplingParams, TokenLogprobs
from moot.model import noise
from moot.model.logits import add_bias, add_penalties, first_highest, keep_min_p, keep_top_k, keep_top_p, only

__all__ = ["History", "HistoryOnPath", "Sampler"]

NEAR = 8.0
"""Nats below the highest logit within which noise is computed at once; the few others that can win come after."""

MAX_CACHED_ID_SETS = 64


class Sampler:
    """Samples from rows of logits of one model. Holds no state of any request; not thread-safe.

    `vocab_size` is the tokenizer's: logits at or above it are padding and never read. Rows are floating tensors
    [vocab_padded] on any device; a row that is NaN, +inf or without a finite allowed logit raises RequestPoisoned.
    """

    def __init__(self, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        self.vocab_size = vocab_size
        self.end_token_ids = end_token_ids
        self._id_sets: dict[tuple[frozenset[int], torch.device], Tensor] = {}

    def needs_row(self, params: SamplingParams, num_output: int) -> bool:
        """Whether a token must come from `sample`: false where it is the highest raw logit (`greedy_rows`)."""
        return (
            not params.is_greedy
            or bool(params.logit_bias)
            or params.allowed_token_ids is not None
            or params.has_penalties
            or num_output < params.min_tokens
        )

    def greedy_rows(self, logits: Tensor) -> list[int | None]:
        """For each row of `logits` [rows, vocab_padded] the lowest id of its highest logit, None for a poisoned row."""
        if logits.shape[0] == 0:
            return []
        rows = logits[:, : self.vocab_size]
        highest, ids = rows.max(dim=1)
        is_highest = rows == highest[:, None]
        tied = is_highest.sum(dim=1) > 1
        result: list[int | None] = ids.tolist()
        for index in tied.nonzero()[:, 0].tolist():
            result[index] = int(is_highest[index].nonzero()[0, 0])
        for index in (~highest.isfinite()).nonzero()[:, 0].tolist():
            result[index] = None
        return result

    def sample(
        self,
        logits: Tensor,
        params: SamplingParams,
        position: int,
        history: History | HistoryOnPath,
        grammar_mask: Tensor | None = None,
    ) -> int:
        """The token at absolute `position`, from one row [vocab_padded].

        `history` holds prompt, committed output and the draft tokens before this position on this path.
        `grammar_mask`: bool [vocab_size], true for the ids a grammar allows here.
        """
        row = self._processed(logits, params, history, grammar_mask)
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
        row = self._processed(logits, params, history, None)
        return self._choose(row, params, position, params.temperature / sharpen)

    def draft_tokens(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        positions: Sequence[int],
        histories: Sequence[History | HistoryOnPath] | None = None,
        sharpen: float = 1.0,
    ) -> list[int | None]:
        """`draft_token` for each row [rows, vocab_padded], of one request each; None for a poisoned row."""
        result = self.greedy_rows(logits)
        for index, (row_params, position) in enumerate(zip(params, positions, strict=True)):
            history = None if histories is None else histories[index]
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
            ids, values = keep_top_k(torch.arange(row.numel(), device=row.device), row, num_top)
            values, order = torch.sort(values, descending=True, stable=True)
            listed = (values.to(torch.float64) - log_total).tolist()
            top = list(zip(ids[order].tolist(), listed, strict=True))
        return TokenLogprobs(float(logit) - log_total, rank, tuple(top))

    def probabilities(self, logits: Tensor, token_ids: Sequence[int]) -> list[float]:
        """Softmax probability of `token_ids[i]` in row i of [rows, vocab_padded]: a drafter's confidence."""
        rows = logits[:, : self.vocab_size].to(torch.float32)
        ids = torch.tensor(token_ids, dtype=torch.int64, device=rows.device)[:, None]
        chosen: list[float] = (rows.gather(1, ids)[:, 0] - rows.logsumexp(dim=1)).exp().tolist()
        return chosen

    def _processed(
        self,
        logits: Tensor,
        params: SamplingParams,
        history: History | HistoryOnPath | None,
        grammar_mask: Tensor | None,
    ) -> Tensor:
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
        if grammar_mask is not None:
            row = row.masked_fill(~grammar_mask, MASKED)
        if history is not None and history.num_output < params.min_tokens:
            ending = self._id_tensor(params.ending_token_ids(self.end_token_ids), row.device)
            row = row.index_fill(0, ending, MASKED)
        return row

    def _choose(self, row: Tensor, params: SamplingParams, position: int, temperature: float) -> int:
        highest = _highest(row)
        if params.is_greedy:
            return first_highest(row)
        scope = NOISE_RANGE
        if params.top_p < 1.0:
            scope = max(scope, (weight_bits(self.vocab_size) + 1) * math.log(2.0))
        # One nat more than needed covers rounding. Rounding the limit to the row's dtype is monotone: it loses nobody.
        ids = (row >= highest - (scope + 1.0) * temperature).nonzero()[:, 0]
        scaled = row[ids].to(torch.float64).sub_(highest).div_(temperature)
        if params.top_k > 0:
            ids, scaled = keep_top_k(ids, scaled, params.top_k)
        if params.top_p < 1.0:
            ids, scaled = keep_top_p(ids, scaled, params.top_p, self.vocab_size)
        if params.min_p > 0.0:
            ids, scaled = keep_min_p(ids, scaled, params.min_p)
        return _noisy_highest(ids, scaled, params.seed, position)

    def _id_tensor(self, token_ids: frozenset[int], device: torch.device) -> Tensor:
        """Ids of the set inside the vocabulary, int64 on `device`. The last sets are remembered: they may be large."""
        key = (token_ids, device)
        if key not in self._id_sets:
            while len(self._id_sets) >= MAX_CACHED_ID_SETS:
                del self._id_sets[next(iter(self._id_sets))]
            inside = sorted(token_id for token_id in token_ids if 0 <= token_id < self.vocab_size)
            self._id_sets[key] = torch.tensor(inside, dtype=torch.int64, device=device)
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
    """argmax of scaled + noise over `ids` (int64 ascending), the lowest id in a tie."""
    near = scaled > -NEAR
    near_ids = ids[near]
    scores = scaled[near] + noise.gumbel(seed, position, near_ids)
    best = float(scores.max())
    # A far token scores below its noise - NEAR, and no noise exceeds HIGHEST_NOISE: almost no hash is high enough.
    if best + NEAR <= HIGHEST_NOISE and near_ids.numel() < ids.numel():
        far_ids, far_scaled = ids[~near], scaled[~near]
        hashes = noise.hash32(seed, position, far_ids)
        high = (hashes >= noise.lowest_hash_reaching(best + NEAR)).nonzero()[:, 0]
        if high.numel():
            near_ids = torch.cat([near_ids, far_ids[high]])
            scores = torch.cat([scores, far_scaled[high] + noise.gumbel_of(hashes[high])])
            best = float(scores.max())
    return int(near_ids[scores == best].min())
