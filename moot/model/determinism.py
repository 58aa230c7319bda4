"""Numbers that do not depend on the company they keep.

A matrix product may round a row differently depending on how many rows share the call and where the row lies among
them: BLAS libraries have other kernels for few rows and for remainders. In deterministic mode every product runs in
tiles of at most 32 rows, padded to a row count inside one class of bit-equal counts; attention runs per request in
tiles of at most 32 query rows, padded likewise, over a KV length that is a multiple of 512. A check at start compares
bit by bit and refuses the mode where this does not hold.

Measured with torch 2.13 on CPUs with and without AMX: bfloat16 products are equal for 1 to 32 rows; float32 and
float64 ones are not for 1, 2 to 3 (2 to 12) rows nor in the remainder of a multiple of 4, but are in multiples of 16.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class RowRules:
    """How many rows share a product. A multiple of 1 with a tile of 2^31 rows is the natural mode."""

    tile: int
    linear_multiple: int
    attention_multiple: int
    pad_kv: bool

    def linear_rows(self, num_rows: int) -> int:
        return -(-num_rows // self.linear_multiple) * self.linear_multiple

    def attention_rows(self, num_rows: int) -> int:
        return -(-num_rows // self.attention_multiple) * self.attention_multiple


NATURAL = RowRules(2**31, 1, 1, False)


def deterministic_rules(dtype: torch.dtype) -> RowRules:
    if dtype is torch.bfloat16:
        return RowRules(TILE_ROWS, 1, 2, True)
    return RowRules(TILE_ROWS, 16, 8, True)


@dataclass(frozen=True, slots=True)
class Tiling:
    """What is in force while a runner drives a model on this thread."""

    rules: RowRules
    progress: Callable[[], None]


_tiling: ContextVar[Tiling | None] = ContextVar("moot_tiling", default=None)


@contextmanager
def tiled(rules: RowRules, progress: Callable[[], None]) -> Iterator[None]:
    token = _tiling.set(Tiling(rules, progress))
    try:
        yield
    finally:
        _tiling.reset(token)


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` under the rules in force: x [..., in] to [..., out]."""
    tiling = _tiling.get()
    if tiling is None:
        return functional.linear(x, weight, bias)
    rules = tiling.rules
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= rules.tile and num_rows == rules.linear_rows(num_rows):
        return functional.linear(x, weight, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    output = x.new_empty(num_rows, weight.shape[0])
    for start in range(0, num_rows, rules.tile):
        part = rows[start : start + rules.tile]
        count = part.shape[0]
        padding = rules.linear_rows(count) - count
        if padding:
            part = functional.pad(part, (0, 0, 0, padding))
        output[start : start + count] = functional.linear(part, weight, bias)[:count]
        tiling.progress()
    return output.view(*x.shape[:-1], weight.shape[0])


class TiledLinear(nn.Linear):
    """A linear layer whose product follows the rules in force; outside a runner it is `nn.Linear`."""

    @classmethod
    def take_over(cls, linear: nn.Linear) -> None:
        """Turn a layer into this class in place, so that tied weights and names stay."""
        linear.__class__ = cls

    def forward(self, input: Tensor) -> Tensor:
        return tiled_linear(input, self.weight, self.bias)


def install(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            TiledLinear.take_over(module)


def numerics_fingerprint(dtype: torch.dtype, device: torch.device, rules: RowRules) -> str:
    """sha256 over everything that decides how numbers round. Equal fingerprints: equal bits for equal inputs."""
    if device.type == "cuda":
        unit = torch.cuda.get_device_name(device)
    else:
        unit = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_features()}"
    facts = (
        str(dtype),
        device.type,
        unit,
        torch.__version__,
        str(torch.version.git_version),
        f"threads={torch.get_num_threads()}",
        repr(rules),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _cpu_features() -> str:
    """The CPU's model and vector extensions as the kernel lists them; empty where it does not."""
    wanted: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() in ("vendor_id", "cpu family", "model", "flags"):
                    wanted.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor()
    flags = sorted(flag for flag in wanted.pop("flags", "").split() if flag.startswith(("avx", "amx", "fma", "sse")))
    return " ".join([*wanted.values(), *flags])
