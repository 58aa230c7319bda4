"""How much of what a drafter proposes is right, on rows that nothing was learned from.

Rounds as they happen: from a known prefix a chain is proposed, its leading right tokens and one more are committed.
For a chain it is enough to know, for each position, how many leading tokens would be right there.

How much of what a drafter kind proposes is right, by asking it at every position of held-out answers.

The divergence of a drafter's next-token distribution from the target's, without keeping logits.

The target's logits are computed again from its stored states. Loss and gradients are found in one go, few rows at a
time, so that a table of rows x ids never leaves the cache of a core for long.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from lab.training.dataset import ANSWERS, GREEDY, SAMPLED, TrainingText
from moot.core.types import SamplingParams
from moot.drafters.interface import Ask, Drafter

LENGTHS = (4, 8)
LONGEST = max(LENGTHS)
MOST_MEASURED = 24_000
"""Held-out positions that acceptance is reported on, at most."""


@dataclass(frozen=True, slots=True)
class TokenStream:
    """A row with its `right` [positions]: how many tokens of a chain proposed after position p are the ones that
    follow, at most LONGEST."""

    roles: NDArray[np.uint8]
    right: NDArray[np.int64]


def runs(roles: NDArray[np.uint8], role: int) -> Iterator[tuple[int, int]]:
    """First position and end of each stretch of `role`, those at the row's begin left out: nothing is known before."""
    attached = np.concatenate(([False], roles == role, [False]))
    borders = np.flatnonzero(attached[1:] != attached[:-1])
    for first, end in zip(borders[::2].tolist(), borders[1::2].tolist(), strict=True):
        if first >= 2:
            yield first, end


def report(streams: Sequence[TokenStream]) -> dict[str, float]:
    """`tokens`, `agreement_1`..`agreement_4` (given that the tokens before it were right) and `length_4`, `length_8`
    (mean acceptance length, next token included) of greedy answers, and the same of sampled ones with `sampled_`."""
    result: dict[str, float] = {}
    for role, prefix in ((GREEDY, ""), (SAMPLED, "sampled_")):
        stretches = [(stream, first, end) for stream in streams for first, end in runs(stream.roles, role)]
        result[f"{prefix}tokens"] = sum(end - first for _, first, end in stretches)
        for depth in range(1, 5):
            reached = hit = 0
            for stream, first, end in stretches:
                right = stream.right[first - 1 : end - depth]
                reached += int((right >= depth - 1).sum())
                hit += int((right >= depth).sum())
            result[f"{prefix}agreement_{depth}"] = round(hit / reached, 4) if reached else 0.0
        for length in LENGTHS:
            rounds = sum(_rounds(stream.right, first, end, length) for stream, first, end in stretches)
            result[f"{prefix}length_{length}"] = round(result[f"{prefix}tokens"] / rounds, 4) if rounds else 0.0
    return result


def _rounds(right: NDArray[np.int64], first: int, end: int, length: int) -> int:
    position, rounds = first - 1, 0
    while position < end - 1:
        position += min(int(right[position]), length) + 1
        rounds += 1
    return rounds


def leading(matches: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Leading true values along the last axis."""
    counted: NDArray[np.int64] = np.cumprod(matches.astype(np.int64), -1).sum(-1)
    return counted


def from_single(matches: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`right` [positions] of a drafter that reads the text alone, from whether the one token it would propose after
    each position is right: it guesses the next one as if it had been given the right ones before."""
    padded = np.concatenate((matches, np.zeros(LONGEST, np.bool_)))
    return leading(np.lib.stride_tricks.sliding_window_view(padded, LONGEST)[: len(matches)])


def measure_kind(drafter: Drafter[Any], text: TrainingText) -> dict[str, float]:
    """As `acceptance.report` gives it, on the rows of `text` that nothing is learned from."""
    streams: list[TokenStream] = []
    measured = 0
    for context, roles, _ in text.contexts():
        ids: list[int] = context.tolist()
        right = np.zeros(len(ids), np.int64)
        session = drafter.open((), SamplingParams())
        for position, token in enumerate(ids):
            drafter.extend(session, [token])
            if position + 1 < len(ids) and roles[position + 1] in ANSWERS:
                (chains,) = drafter.propose([Ask(session, LONGEST)])
                right[position] = _num_right(chains[0].token_ids, ids[position + 1 :]) if chains else 0
        drafter.close(session)
        streams.append(TokenStream(roles, right))
        measured += int(np.isin(roles, ANSWERS).sum())
        if measured >= MOST_MEASURED:
            break
    return report(streams)


def _num_right(chain: tuple[int, ...], following: list[int]) -> int:
    count = 0
    for guess, token in zip(chain, following, strict=False):
        if guess != token:
            break
        count += 1
    return count


_ROWS = 256
_LEAST_SHARE = 1e-4
"""Of the ids that are not among the rows."""


class _Divergence(Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        rows: Tensor,
        bias: Tensor | None,
        other: Tensor | None,
        teacher_states: Tensor,
        teacher_rows: Tensor,
        log_totals: Tensor | None,
    ) -> Tensor:
        count, dtype = states.shape[0], teacher_rows.dtype
        learned, own_rows = states.to(dtype), rows.to(dtype)
        loss = torch.zeros((), dtype=torch.float64)
        to_states = torch.empty(states.shape)
        to_rows = torch.zeros(rows.shape) if ctx.needs_input_grad[1] else None
        to_bias = None if bias is None else torch.zeros(bias.shape)
        to_other = None if other is None else torch.zeros(other.shape)
        for start in range(0, count, _ROWS):
            part = slice(start, start + _ROWS)
            log_p = _log_probabilities(teacher_states[part] @ teacher_rows.T, log_totals, part)
            logits = (learned[part] @ own_rows.T).float()
            if other is not None:
                logits = torch.cat((logits, (states[part].float() @ other)[:, None]), 1)
            log_q = torch.log_softmax(logits if bias is None else logits.add_(bias), 1)
            p = log_p.exp()
            loss += torch.sum(p * log_p.sub_(log_q), dtype=torch.float64)
            gradient = log_q.exp_().sub_(p).div_(count)
            narrow = gradient[:, : len(own_rows)].to(dtype)
            to_states[part] = narrow @ own_rows
            if to_rows is not None:
                to_rows += narrow.T @ learned[part]
            if to_bias is not None:
                to_bias += gradient.sum(0)
            if other is not None and to_other is not None:
                to_states[part] += gradient[:, -1:] * other
                to_other += gradient[:, -1] @ states[part].float()
        ctx.save_for_backward(to_states.to(states.dtype), to_rows, to_bias, to_other)
        return (loss / count).float()

    @staticmethod
    def backward(ctx: Any, *upstream: Any) -> Any:
        scaled = [None if gradient is None else gradient * upstream[0] for gradient in ctx.saved_tensors]
        return (*scaled, None, None, None)


def _log_probabilities(logits: Tensor, log_totals: Tensor | None, part: slice) -> Tensor:
    """Of the target: of the given ids alone, or with `log_totals` of all others together in one more column."""
    logits = logits.float()
    if log_totals is None:
        return torch.log_softmax(logits, 1)
    # Rounding may find more than everything among the given ids.
    known = (logits.logsumexp(1, keepdim=True) - log_totals[part, None]).exp_().clamp_max_(1 - _LEAST_SHARE)
    return torch.cat((torch.log_softmax(logits, 1) + known.log(), torch.log1p(-known)), 1)


def divergence(
    states: Tensor,
    rows: Tensor,
    teacher_states: Tensor,
    teacher_rows: Tensor,
    bias: Tensor | None = None,
    other: Tensor | None = None,
    log_totals: Tensor | None = None,
) -> Tensor:
    """Mean over n of KL(target || drafter): softmax(teacher_states teacher_rows^T) from softmax(states rows^T + bias).

    states [n, width], rows [ids, width], bias [ids], float32; teacher_states [n, state], teacher_rows [ids, state], in
    the dtype that products are computed in. With `other` [width] and `log_totals` [n], of the target's logits over all
    of its ids, both distributions have one more entry (and so has `bias`), for all ids that are not among the rows.
    """
    loss: Tensor = _Divergence.apply(states, rows, bias, other, teacher_states, teacher_rows, log_totals)  # type: ignore[no-untyped-call]
    return loss
