"""The target as trainers need it: its embedding, its output layer, and the proof that they fit the stored states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.training.dataset import TextStore
from moot.core.errors import ModelRefused
from moot.core.types import ModelInfo
from moot.model.decoder.products import can_pack
from moot.model.loading.load import load_model

_MOST_APART = 0.25
"""Between a stored total and one computed again, in logits: bfloat16 rounds large ones by an eighth."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """`embedding` and `rows` [ids, state], in the dtype of products; they may be one tensor."""

    info: ModelInfo
    tokenizer: Any
    folder: Path
    embedding: Tensor
    rows: Tensor

    @property
    def state(self) -> int:
        return int(self.rows.shape[1])


def product_dtype() -> torch.dtype:
    """bfloat16 where this CPU multiplies it, else float32."""
    return torch.bfloat16 if can_pack(torch.bfloat16, torch.device("cpu")) else torch.float32


def load_teacher(folder: Path, store: TextStore) -> Teacher:
    """Raises ModelRefused where the output layer is more than a product, so that states do not give logits."""
    loaded = load_model(folder, device="cpu", dtype="float32", lean=False)
    model: Any = loaded.model
    dtype = product_dtype()
    embedding = model.get_input_embeddings().weight.detach()
    rows = model.get_output_embeddings().weight.detach()
    _check(loaded.info, store, rows[: loaded.info.vocab_size].to(torch.bfloat16))
    tied = rows is embedding or rows.data_ptr() == embedding.data_ptr()
    embedding = embedding.to(dtype)
    return Teacher(loaded.info, loaded.tokenizer, folder, embedding, embedding if tied else rows.to(dtype))


@torch.inference_mode()
def _check(info: ModelInfo, store: TextStore, rows: Tensor) -> None:
    shard = store.read(store.indices()[0])
    totals = (shard.states(0)[:64].float() @ rows.T.float()).logsumexp(1).numpy()
    apart = float(np.abs(totals - shard.log_totals[0, :64]).max())
    if not apart <= _MOST_APART:
        raise ModelRefused(
            f"{info.model}: its logits are not the product of its last hidden state and its output layer (apart by"
            f" {apart:.2g}), so that nothing can be learned from stored states"
        )
