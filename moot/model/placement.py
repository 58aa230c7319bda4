"""Where a model runs, and in which number format."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from moot.core.errors import ConfigError

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16")
"""Instructions with which products in bfloat16 are faster than in float32. Others may have such, too (ARM's `bf16`):
they were not tried, and `--dtype bfloat16` says it for them."""


def choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.partition(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device {device} is not auto, cpu or cuda")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device} was asked for, but torch finds no GPU")
    return torch.device(device)


def choose_dtype(
    dtype: str, device: torch.device, stored: torch.dtype | None = None, features: Mapping[str, object] | None = None
) -> torch.dtype:
    """`stored`: what the model's config says its weights are; None: nothing. `features`: of the CPU, as torch names
    them; None: those of this one. Raises ConfigError for an unknown name."""
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ConfigError(f"dtype {dtype} is not auto, {', '.join(DTYPES)}")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return cpu_dtype(torch.cpu.get_capabilities() if features is None else features, stored)


def cpu_dtype(features: Mapping[str, object], stored: torch.dtype | None) -> torch.dtype:
    """What `auto` is on a CPU: bfloat16 where it multiplies such numbers, else float32. A pure function, no
    measurement: verifiers that start under different load must not compute different texts. Who stores float64 has a
    reason to, so that this stays."""
    if stored is torch.float64:
        return torch.float64
    return torch.bfloat16 if any(features.get(name) is True for name in BFLOAT16_FEATURES) else torch.float32
