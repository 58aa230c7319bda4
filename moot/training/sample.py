"""Tokens for many rows at once, drawn by inversion: softmax, running sum, search.

Training text needs the target's distribution, not the noise that texts are served with: one uniform number a row
instead of one a vocabulary entry.
"""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits: Tensor, best: Tensor, temperatures: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: `best` where the temperature is 0, else a sample of softmax(logits / temperature).

    logits [rows, vocab]; best, int64, temperatures and uniform (in [0, 1)) [rows].
    """
    ids = best.clone()
    hot = (temperatures > 0).nonzero()[:, 0]
    if len(hot):
        cumulated = torch.softmax(logits[hot] / temperatures[hot, None].to(logits.dtype), 1).cumsum(1)
        wanted = uniform[hot, None].to(logits.dtype) * cumulated[:, -1:]
        ids[hot] = torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return ids
