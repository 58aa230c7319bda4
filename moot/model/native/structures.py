"""The structures of kernels.c."""

from __future__ import annotations

import ctypes

_pointer, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class CPlan(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("rows", "blocks", "threads", "query_heads", "kv_heads", "dim")),
        *((name, _int) for name in ("scratch_floats", "most_queries")),
        *((name, _pointer) for name in ("segments", "row", "block", "paths", "turns", "queries", "mixed", "scratch")),
    )


class CWeight(ctypes.Structure):
    _fields_ = (("outputs", _int), ("inputs", _int), ("weight", _pointer), ("bias", _pointer))


class CNorm(ctypes.Structure):
    _fields_ = (("scale", _pointer), ("epsilon", _float))


class CAttention(ctypes.Structure):
    _fields_ = (("head_scale", _pointer), ("head_epsilon", _float), ("query_scale", _float), ("window", _int))


class CLayer(ctypes.Structure):
    _fields_ = (
        *((name, CNorm) for name in ("before_attention", "before_mlp")),
        *((name, CWeight) for name in ("queries_keys_values", "attended", "gate_up", "down")),
        ("attention", CAttention),
    )


class CRows(ctypes.Structure):
    _fields_ = (
        *((name, _int) for name in ("rows", "width")),
        *((name, _pointer) for name in ("hidden", "delta", "normed", "projected", "active")),
    )
