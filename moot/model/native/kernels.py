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
from moot.model.native.plan import CPlan, StepPlan

_log = logging.getLogger("moot.model")

MOST_DIM = 256
"""Elements of a head at most."""

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernels:
    """Called by one thread at a time. All tensors are contiguous; widths are multiples of 16, head sizes of 32."""

    def __init__(self, library: Path) -> None:
        loaded = ctypes.CDLL(str(library))
        self._norm, self._gate, self._attend = loaded.moot_norm, loaded.moot_gate, loaded.moot_attend
        self._norm.argtypes = (_pointer, _pointer, _pointer, _float, _pointer, _int, _int, _int)
        self._gate.argtypes = (_pointer, _pointer, _int, _int, _int)
        self._attend.argtypes = (ctypes.POINTER(CPlan), _int, _pointer, _pointer, _float, _float, _int)
        for function in (self._norm, self._gate, self._attend):
            function.restype = None
        self.digest = source_digest()

    def norm(self, hidden: Tensor, delta: Tensor | None, scale: Tensor, epsilon: float, out: Tensor) -> None:
        """hidden += delta; out = hidden / sqrt(mean(hidden^2) + epsilon) * scale.

        hidden, delta, out: bfloat16 [rows, width]; scale: float32 [width].
        """
        rows, width = hidden.shape
        added = None if delta is None else delta.data_ptr()
        threads = torch.get_num_threads()
        self._norm(hidden.data_ptr(), added, scale.data_ptr(), epsilon, out.data_ptr(), rows, width, threads)

    def gate(self, gate_up: Tensor, out: Tensor) -> None:
        """out = silu(gate) * up; gate_up: bfloat16 [rows, 2 width], gate first; out: [rows, width]."""
        rows, width = out.shape
        self._gate(gate_up.data_ptr(), out.data_ptr(), rows, width, torch.get_num_threads())

    def attend(
        self,
        plan: StepPlan,
        layer: int,
        projected: Tensor,
        norm: Tensor | None,
        epsilon: float,
        query_scale: float,
        window: int | None,
    ) -> Tensor:
        """Turn queries and keys, store keys and values, attend: [rows, query heads * dim], valid until the next call.

        projected: bfloat16 [rows, (query heads + 2 kv heads) * dim], pairs that are turned together side by side;
        norm: float32 [query heads + kv heads, dim], the scales of a normalisation of each head.
        """
        scales = None if norm is None else norm.data_ptr()
        self._attend(plan.c_plan, layer, projected.data_ptr(), scales, epsilon, query_scale, window or 0)
        return plan.mixed


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
