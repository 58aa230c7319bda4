"""The compiled kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor

from moot.model.cpu import cpu_flags
from moot.model.native.build import CPU_FLAGS, find_or_build, source_digest
from moot.model.native.structures import CAttention, CLayer, CNorm, CPlan, CRows, CWeight

_log = logging.getLogger("moot.model")

MOST_DIM = 256
"""Elements of a head at most."""

HALF, GATED, SINGLE = range(3)
"""What a product gives, as kernels.c numbers it."""


class Kernels:
    """Called by one thread at a time. All tensors are contiguous; widths are multiples of 16, head sizes of 32."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._norm, self._product = loaded.moot_norm, loaded.moot_product
        self._attend, self._layer = loaded.moot_attend, loaded.moot_layer
        pointer, number, reference = ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER
        self._norm.argtypes = (reference(CNorm), pointer, pointer, pointer, number, number, ctypes.c_int)
        self._product.argtypes = (reference(CWeight), pointer, pointer, number, ctypes.c_int, ctypes.c_int)
        self._attend.argtypes = (reference(CPlan), reference(CAttention), number, pointer)
        self._layer.argtypes = (reference(CPlan), reference(CLayer), number, reference(CNorm), reference(CRows))
        for function in (self._norm, self._product, self._attend, self._layer):
            function.restype = None
        self.digest = source_digest()

    def norm(self, by: CNorm, hidden: Tensor, delta: Tensor | None, out: Tensor) -> None:
        """hidden += delta; out = hidden / sqrt(mean(hidden^2) + epsilon) * scale.

        All [rows, width], float32; out bfloat16.
        """
        rows, width = hidden.shape
        added = None if delta is None else delta.data_ptr()
        self._norm(by, hidden.data_ptr(), added, out.data_ptr(), rows, width, torch.get_num_threads())

    def product(self, by: CWeight, x: Tensor, out: Tensor, gated: bool) -> None:
        """bfloat16 [rows, inputs] to bfloat16 or float32 [rows, outputs], of which `gated` makes half as many."""
        gives = GATED if gated else SINGLE if out.dtype is torch.float32 else HALF
        self._product(by, x.data_ptr(), out.data_ptr(), x.shape[0], gives, torch.get_num_threads())

    def attend(self, plan: CPlan, how: CAttention, layer: int, projected: Tensor) -> None:
        """Turn queries and keys, store keys and values, attend, into the plan's `mixed`.

        projected: bfloat16 [rows, (query heads + 2 kv heads) * dim], pairs that are turned together side by side.
        """
        self._attend(plan, how, layer, projected.data_ptr())

    def layer(self, plan: CPlan, layer: CLayer, index: int, following: CNorm, rows: CRows) -> None:
        """A whole layer, from its normed rows to those of `following`."""
        self._layer(plan, layer, index, following, rows)


@functools.cache
def load_kernels(cache: Path) -> Kernels | None:
    """The kernels, compiled first where need be; None where this CPU or a missing compiler does not allow them."""
    if not cpu_flags() >= CPU_FLAGS:
        return None
    library = find_or_build(cache)
    if library is None:
        return None
    try:
        return Kernels(library)
    except (OSError, AttributeError) as error:
        _log.warning("kernels cannot be loaded, passes take longer: %s", error)
        return None
