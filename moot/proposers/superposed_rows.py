"""Rows behind a draft model's embeddings that hold weighted sums of them, so that a sum can be fed like an id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from moot.model.decoder.decoder import Decoder
from moot.model.load import LoadedModel


class MixedRows:
    """Widens the embeddings of `loaded` by `count` rows. Ids of texts are below `num_ids`, as before.

    `loaded`, the attribute, is the model to build a runner of; the one that was handed in computes no more. Embeddings
    are looked up, scaled and projected linearly in every family, so that a sum of rows is the sum of what is made of
    them.
    """

    def __init__(self, loaded: LoadedModel, count: int) -> None:
        embeddings: Any = loaded.model.get_input_embeddings()  # type: ignore[operator]
        table = torch.cat((embeddings.weight.detach(), embeddings.weight.new_zeros(count, embeddings.weight.shape[1])))
        embeddings.weight = nn.Parameter(table, requires_grad=False)
        embeddings.num_embeddings = table.shape[0]
        self._table = embeddings.weight.detach()
        decoder = loaded.decoder
        if decoder is not None:
            decoder = Decoder(replace(decoder.weights, embedding=self._table), decoder.kernels)
        self.num_ids = loaded.num_embeddings
        self.count = count
        self.loaded = replace(loaded, decoder=decoder, num_embeddings=self.num_ids + count)

    @torch.inference_mode()
    def put(self, row: int, token_ids: Sequence[int], weights: Sequence[float]) -> int:
        """Write the weighted sum of the embeddings of `token_ids` into row number `row`; returns what to feed for it.

        A single id needs no row: it is returned as it is. Weights are finite and sum to 1.
        """
        if len(token_ids) == 1:
            return token_ids[0]
        table = self._table
        exact = torch.promote_types(table.dtype, torch.float32)
        rows = table[torch.tensor(token_ids, device=table.device)].to(exact)
        table[self.num_ids + row] = torch.tensor(weights, dtype=exact, device=table.device) @ rows
        return self.num_ids + row
