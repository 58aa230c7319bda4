"""The likeliest ids of a row of logits, as hints for drafters that live from them: no token depends on them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
