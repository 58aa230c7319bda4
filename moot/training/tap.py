"""The target's last hidden state: what its output layer is given, as the runner computes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moot.model.decoder.products import Product
from moot.model.load import LoadedModel


class Tap:
    """Collects the rows that go into the output layer, after the last norm."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self._rows.append(rows.detach().reshape(-1, rows.shape[-1]))

    def take(self) -> Tensor:
        """[rows, width] of all passes since the last call."""
        rows, self._rows = self._rows, []
        return torch.cat(rows)


class _TappedProduct(Product):
    """The output layer of a decoder, which tells a tap what it is given."""

    __slots__ = ("_product", "_tap")

    def __init__(self, product: Product, tap: Tap) -> None:
        self.outputs, self.inputs, self.has_bias = product.outputs, product.inputs, product.has_bias
        self._product, self._tap = product, tap

    def __call__(self, x: Tensor) -> Tensor:
        self._tap.add(x)
        return self._product(x)


@contextmanager
def tapped(loaded: LoadedModel) -> Iterator[Tap]:
    """While it lasts, passes over `loaded` leave the hidden states of their logit rows in the tap."""
    tap = Tap()
    if loaded.decoder is not None:
        product = loaded.decoder.head
        loaded.decoder.head = _TappedProduct(product, tap)
        try:
            yield tap
        finally:
            loaded.decoder.head = product
        return
    model: Any = loaded.model

    def tell(module: Any, inputs: tuple[Tensor, ...]) -> None:
        tap.add(inputs[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(tell)
    try:
        yield tap
    finally:
        handle.remove()
