"""The one sampler for all rows of a step at once, on the device: ids are those of `moot.core.sampling`.

Made for accelerators: nothing waits for the device until everything a step needs is fetched in one piece. Rows with
top-k or top-p are filtered among their CANDIDATES highest tokens, which nearly always hold all that is kept; where they
may not (a nucleus of more tokens, or equal logits on both sides of the border), the row is marked and `Sampler` takes
it. Never run on a GPU by this project; tests compare it id by id on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moot.core.errors import RequestPoisoned
from moot.core.history import History, HistoryOnPath
from moot.core.noise import position_key
from moot.core.sampling import MASKED, weight_bits
from moot.core.types import SamplingParams, TokenLogprobs
from moot.model.gpu.pool import upload
from moot.model.sampling.logits import first_highest_rows, gumbel_rows
from moot.model.sampling.sampler import Sampler

CANDIDATES = 1024
"""Tokens of a row among which top-k and top-p look first."""

ROWS_AT_ONCE = 128
"""Rows whose float64 copies exist at a time: of 128 thousand tokens, 130 MB each."""

_FINE, _POISONED, _UNSURE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class RowSpec:
    """What one row of logits is sampled by. `history` ends with the draft tokens on the row's path."""

    params: SamplingParams
    position: int
    history: History | HistoryOnPath
    num_top: int | None = None
    """Alternatives whose log-probabilities are wanted; None: not even the token's own."""
    num_candidates: int = 0
    """Most likely ids wanted besides."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn row. `token_id` None: the row is poisoned."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    candidates: tuple[int, ...] = ()


@dataclass(slots=True)
class _Sparse:
    """Entries of rows that processing changes: row, id (below `vocab_size`) and value of each."""

    vocab_size: int
    rows: list[int] = field(default_factory=list)
    ids: list[np.ndarray] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)

    def add(self, row: int, token_ids: Sequence[int], values: Sequence[float] | None = None) -> None:
        ids = np.array(token_ids, dtype=np.int64)
        attached = (ids >= 0) & (ids < self.vocab_size)
        self.rows += [row] * int(attached.sum())
        self.ids.append(ids[attached])
        self.values.append((np.zeros(len(ids)) if values is None else np.array(values, dtype=np.float64))[attached])

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Rows and ids (int64) and values (float64)."""
        ids = np.concatenate(self.ids) if self.ids else np.zeros(0, np.int64)
        values = np.concatenate(self.values) if self.values else np.zeros(0)
        index = upload(np.stack((np.array(self.rows, np.int64), ids)), device)
        return index[0], index[1], upload(values, device)


class BatchSampler:
    """Draws the tokens of all rows of a step at once. Not thread-safe. `sampler` gives vocabulary and end tokens, and
    takes the rows that are unsure here."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._vocab_size = sampler.vocab_size
        self._num_candidates = min(CANDIDATES, self._vocab_size)

    def draw(self, logits: Tensor, specs: Sequence[RowSpec]) -> list[Drawn]:
        """The token of each row of `logits` [rows, vocab_padded], one spec per row. Waits for the device once, and once
        more where a row is unsure."""
        if not specs:
            return []
        rows = logits[:, : self._vocab_size]
        ids, states = self._tokens(rows, specs)
        fetched = [ids, states]
        width = min(self._vocab_size, max(max(spec.num_top or 0, spec.num_candidates) for spec in specs))
        wants = any(spec.num_top is not None for spec in specs)
        if wants or width:
            fetched += self._likeliest(rows, ids, width)
        table = torch.cat([part.view(len(specs), -1) for part in fetched], 1).cpu()
        result = []
        for index, (spec, entry) in enumerate(zip(specs, table, strict=True)):
            token, state = int(entry[0]), int(entry[1])
            if state == _UNSURE:
                result.append(self._alone(logits[index], spec))
            elif state == _POISONED:
                result.append(Drawn(None))
            else:
                result.append(_drawn(token, spec, entry[2:], width))
        return result

    def _alone(self, row: Tensor, spec: RowSpec) -> Drawn:
        try:
            token = self._sampler.sample(row, spec.params, spec.position, spec.history)
        except RequestPoisoned:
            return Drawn(None)
        logprobs = None if spec.num_top is None else self._sampler.logprobs(row, token, spec.num_top)
        best = self._sampler.logprobs(row, token, spec.num_candidates).top if spec.num_candidates else ()
        return Drawn(token, logprobs, tuple(token_id for token_id, _ in best))

    def _tokens(self, rows: Tensor, specs: Sequence[RowSpec]) -> tuple[Tensor, Tensor]:
        """Ids and states, int64 [rows]."""
        plain = [
            index
            for index, spec in enumerate(specs)
            if not self._sampler.needs_row(spec.params, spec.history.num_output)
        ]
        others = sorted(set(range(len(specs))) - set(plain))
        if not others:
            return self._greedy(rows)
        ids = torch.empty(len(specs), dtype=torch.int64, device=rows.device)
        states = torch.empty_like(ids)
        chunks = [others[start : start + ROWS_AT_ONCE] for start in range(0, len(others), ROWS_AT_ONCE)]
        for indices in [*([plain] if plain else []), *chunks]:
            index = upload(np.array(indices, dtype=np.int64), rows.device)
            own = rows.index_select(0, index)
            found = self._greedy(own) if indices is plain else self._processed(own, [specs[one] for one in indices])
            ids.index_copy_(0, index, found[0])
            states.index_copy_(0, index, found[1])
        return ids, states

    def _greedy(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids = first_highest_rows(rows)
        finite = rows.gather(1, ids[:, None])[:, 0].isfinite()
        return ids, torch.where(finite, _FINE, _POISONED)

    def _processed(self, raw: Tensor, specs: Sequence[RowSpec]) -> tuple[Tensor, Tensor]:
        """Ids and states of rows whose logits are processed, or that need noise."""
        device = raw.device
        finite = raw.amax(1).isfinite()
        rows = self._process(raw.to(torch.float64, copy=True), specs)
        highest = rows.amax(1)
        finite &= highest.isfinite()
        numbers = np.array(
            [
                (
                    1.0 if spec.params.is_greedy else spec.params.temperature,
                    math.log(spec.params.min_p) if spec.params.min_p > 0.0 else MASKED,
                    spec.params.top_p,
                )
                for spec in specs
            ]
        )
        temperature, lowest, top_p = upload(numbers.T.copy(), device)[:, :, None]
        keys = [position_key(spec.params.seed, spec.position) for spec in specs]
        flags = [(*key, spec.params.top_k, spec.params.is_greedy) for key, spec in zip(keys, specs, strict=True)]
        low, high, top_k, is_greedy = upload(np.array(flags, dtype=np.int64).T.copy(), device)
        greedy_ids = first_highest_rows(rows)
        if all(spec.params.is_greedy for spec in specs):
            return greedy_ids, torch.where(finite, _FINE, _POISONED)
        scaled = rows.sub_(highest[:, None]).div_(temperature)
        filtered = [bool(spec.params.top_k > 0 or spec.params.top_p < 1.0) for spec in specs]
        unsure = torch.zeros_like(finite)
        if all(filtered):
            drawn, unsure = self._filtered(scaled, lowest, top_p, top_k, low, high)
        else:
            noise = gumbel_rows(low[:, None], high[:, None], torch.arange(self._vocab_size, device=device)[None])
            drawn = first_highest_rows(noise.add_(scaled).masked_fill_(scaled < lowest, MASKED))
            if any(filtered):
                among, unsure = self._filtered(scaled, lowest, top_p, top_k, low, high)
                is_filtered = (top_k > 0) | (top_p[:, 0] < 1.0)
                drawn, unsure = torch.where(is_filtered, among, drawn), unsure & is_filtered
        greedy = is_greedy.bool()
        states = torch.where(finite, torch.where(unsure & ~greedy, _UNSURE, _FINE), _POISONED)
        return torch.where(greedy, greedy_ids, drawn), states

    def _process(self, rows: Tensor, specs: Sequence[RowSpec]) -> Tensor:
        """Apply bias, allowed ids, penalties and min_tokens, in this order, in place on float64 [rows, vocab]."""
        device = rows.device
        biases, allowed, counts, banned = (_Sparse(self._vocab_size) for _ in range(4))
        rates: list[tuple[float, float, float]] = []
        for row, spec in enumerate(specs):
            params = spec.params
            if params.logit_bias:
                biases.add(row, list(params.logit_bias), list(params.logit_bias.values()))
            if params.allowed_token_ids is not None:
                allowed.add(row, list(params.allowed_token_ids))
            if params.has_penalties:
                counts.add(row, *spec.history.seen())
            rates.append((params.repetition_penalty, params.frequency_penalty, params.presence_penalty))
            if spec.history.num_output < params.min_tokens:
                banned.add(row, list(params.ending_token_ids(self._sampler.end_token_ids)))
        if biases.rows:
            at, ids, values = biases.on(device)
            rows[at, ids] += values
        if any(spec.params.allowed_token_ids is not None for spec in specs):
            free = np.array([spec.params.allowed_token_ids is None for spec in specs])
            kept = upload(free, device)[:, None].expand(rows.shape).contiguous()
            at, ids, _ = allowed.on(device)
            kept[at, ids] = True
            rows.masked_fill_(~kept, MASKED)
        if counts.rows:
            at, ids, times = counts.on(device)
            repetition, frequency, presence = upload(np.array(rates).T.copy(), device)[:, at]
            old = rows[at, ids]
            new = torch.where(old > 0, old / repetition, old * repetition)
            # Each operation rounds by itself, as in the reference: nothing may contract them.
            decrease = times * frequency
            new = new - decrease
            rows[at, ids] = torch.where(times > 0, new - presence, new)
        if banned.rows:
            at, ids, _ = banned.on(device)
            rows[at, ids] = MASKED
        return rows

    def _filtered(
        self, scaled: Tensor, lowest: Tensor, top_p: Tensor, top_k: Tensor, low: Tensor, high: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Ids after top-k, top-p and min-p, and which rows are unsure. `scaled` float64 [rows, vocab], highest 0."""
        count, size = self._num_candidates, self._vocab_size
        ids = torch.topk(scaled, count, dim=1).indices.sort(1).values
        # By value descending, then id ascending.
        values, order = scaled.gather(1, ids).sort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
        ranks = torch.arange(count, device=scaled.device)[None]
        limit = torch.where(top_k > 0, top_k, size).clamp_max(size)[:, None]
        unit = 2.0 ** weight_bits(size)
        weights = values.exp().mul_(unit).add_(0.5).floor_().masked_fill_(ranks >= limit, 0.0)
        everything = scaled.exp().mul_(unit).add_(0.5).floor_().sum(1, keepdim=True)
        total = torch.where(limit < size, weights.sum(1, keepdim=True), everything)
        reached = (weights.cumsum(1) < top_p * total).sum(1, keepdim=True) + 1
        num_kept = torch.where(top_p < 1.0, torch.minimum(reached, limit), limit)
        attached = num_kept.clamp_max(count)
        at_border = values.gather(1, attached - 1)
        # Of tokens equal to the last candidate others may lie outside, with lower ids; and the sum over the first top_k
        # tokens is not known where they are more than the candidates. What is masked can not win.
        unsure = (num_kept > count) | (at_border == values[:, -1:]) | ((limit > count) & (limit < size))
        unsure &= values[:, -1:] > MASKED if count < size else False
        noise = gumbel_rows(low[:, None], high[:, None], ids)
        scores = noise.add_(values).masked_fill_((ranks >= attached) | (values < lowest), MASKED)
        best = scores == scores.amax(1, keepdim=True)
        return ids.masked_fill(~best, size - 1).amin(1), unsure[:, 0]

    def _likeliest(self, rows: Tensor, ids: Tensor, width: int) -> list[Tensor]:
        """Likely ids of the raw rows, as int64 bit patterns: log-probability and rank of `ids`, the best ids and
        theirs.

        The best `width` are in the order of value descending, id ascending; among equal ones at the end any may be left
        out.
        """
        exact = rows.to(torch.float64)
        highest = exact.amax(1, keepdim=True)
        log_total = highest + (exact - highest).exp_().sum(1, keepdim=True).log_()
        own = exact.gather(1, ids[:, None])
        numbers = torch.arange(rows.shape[1], device=rows.device)[None]
        rank = ((exact > own) | ((exact == own) & (numbers < ids[:, None]))).sum(1) + 1
        best = torch.topk(exact, width, dim=1).indices.sort(1).values
        values, order = exact.gather(1, best).sort(dim=1, descending=True, stable=True)
        return [
            (own - log_total).view(torch.int64),
            rank,
            best.gather(1, order),
            (values - log_total).contiguous().view(torch.int64),
        ]


def _drawn(token: int, spec: RowSpec, extra: Tensor, width: int) -> Drawn:
    if not len(extra):
        return Drawn(token)
    logprob, rank = float(extra[:1].view(torch.float64)), int(extra[1])
    ids: list[int] = extra[2 : 2 + width].tolist()
    values: list[float] = extra[2 + width :].contiguous().view(torch.float64).tolist()
    logprobs = None
    if spec.num_top is not None:
        logprobs = TokenLogprobs(logprob, rank, tuple(zip(ids, values, strict=True))[: spec.num_top])
    return Drawn(token, logprobs, tuple(ids[: spec.num_candidates]))
