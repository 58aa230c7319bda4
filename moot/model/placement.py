"""Where a model runs, and in which number format."""

from __future__ import annotations

import time

import torch
from torch.nn import functional

from moot.core.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} is not auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} was asked for, but torch finds no GPU")
    return torch.device(device)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype} is not auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if _linear_seconds(torch.bfloat16) < _linear_seconds(torch.float32) else torch.float32


def _linear_seconds(dtype: torch.dtype) -> float:
    """Best of five of a product as verification has it: 8 rows, a weight larger than the cache of a core."""
    weight, rows = torch.zeros(4096, 1024, dtype=dtype), torch.zeros(8, 1024, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        functional.linear(rows, weight)
        best = min(best, time.perf_counter() - start)
    return best
