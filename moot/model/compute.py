"""Options of the place where a model computes, and of its number format. Imports no torch: commands know it too."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.options import Options, option


@dataclass(frozen=True, kw_only=True)
class ComputeOptions(Options):
    """Options of every program that has a model."""

    device: str = option("auto", help="where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        help="number format of the weights; auto: by model and device",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
    )
    num_threads: int = option(0, help="compute threads; 0: as many as torch chooses", minimum=0)


@dataclass(frozen=True, kw_only=True)
class TorchOptions(Options):
    """Options of torch alone."""

    num_threads: int | None = option(None, help="torch threads; none: torch's default", minimum=1)
