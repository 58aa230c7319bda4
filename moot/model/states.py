"""The target's last hidden states of a pass: what its output layer is given, for drafters that read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moot.model.load import LoadedModel


class States:
    """Of one runner. Costs nothing until `start`, and then a reference: nothing is copied."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._keeps = False
        self._given: Tensor | None = None
        self._counts: list[int] = []
        self._rows: Tensor | None = None

    @property
    def keeps(self) -> bool:
        return self._keeps

    def start(self, by_modules: bool = True) -> None:
        """`by_modules`: the pass is the model's own modules' where it has no decoder."""
        if by_modules and not self._keeps and self._loaded.decoder is None:
            model: Any = self._loaded.model
            model.get_output_embeddings().register_forward_pre_hook(self._on_output_layer)
        self._keeps = True

    def begin(self, counts: Sequence[int]) -> None:
        """A pass begins; `counts`: logit rows of each input."""
        self._counts, self._rows, self._given = list(counts), None, None

    def keep(self, logit_rows: Sequence[int], rows: Tensor | None = None) -> None:
        """A pass has ended. `rows`: where the pass itself has taken the states of the wanted rows, [rows, width]."""
        if not self._keeps:
            return
        if rows is None and self._loaded.decoder is not None:
            rows = self._loaded.decoder.states
        elif rows is None and self._given is not None:
            given = self._given.reshape(-1, self._given.shape[-1])
            # A model that cannot select rows gives its output layer all of them.
            rows = given if self._loaded.selects_rows else given[torch.tensor(logit_rows, device=given.device)]
        self._rows = None if rows is None else rows[: len(logit_rows)]
        self._given = None

    def split(self) -> list[Tensor]:
        if self._rows is None:
            if not self._keeps or any(self._counts):
                raise RuntimeError("no hidden states were kept in the last pass")
            # Not even one row was wanted.
            return [torch.empty(0, 0) for _ in self._counts]
        return list(self._rows.split(self._counts))

    def _on_output_layer(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._given = inputs[0].detach()
