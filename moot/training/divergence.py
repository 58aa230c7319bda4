"""The divergence of a drafter's next-token distribution from the target's, without keeping logits.

The target's logits are computed again from its stored states. Loss and gradients are found in one go, few rows at a
time, so that a table of rows x ids never leaves the cache of a core for long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

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
