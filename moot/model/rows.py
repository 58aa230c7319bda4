"""Rules under which a row's numbers do not depend on its batch-mates.

A matrix product may round a row differently depending on how many rows share the call and where the row lies among
them: BLAS libraries have other kernels for few rows and for remainders. In batch-invariant mode every product runs in
tiles of at most 32 rows (a decoder's of more, where that holds), padded to row counts that are equal bit by bit;
attention runs in tiles of at most 32 query rows of one request, padded likewise, over a KV length that is a multiple of
256. What holds depends on the machine: `selfcheck` picks the cheapest that does, or refuses the mode. What the CPU can
do is read from Linux's list.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional


@functools.cache
def cpu_facts() -> dict[str, str]:
    """The first CPU's entries of /proc/cpuinfo; empty where there is none."""
    facts: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, value = line.partition(":")
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        return {}
    return facts


def cpu_flags() -> frozenset[str]:
    return frozenset(cpu_facts().get("flags", "").split())


TILE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Padding:
    """Row counts that a call may have: at least `minimum`, and a multiple of `multiple`."""

    minimum: int
    multiple: int

    def rows(self, num_rows: int) -> int:
        return -(-max(num_rows, self.minimum) // self.multiple) * self.multiple


@dataclass(frozen=True, slots=True)
class RowRules:
    """The row counts of calls. Attention: at most `tile` query rows, padded; `pad_kv`: over whole spans, masked.

    Products: at most `product_tile` rows; up to `tile` padded by `linear`, more to a multiple of `product_multiple`.
    Attention as two products over at most `product_slots` slots, as one fused call over more of them.

    `by_row`: kernels compute each row's attention by itself, whatever is beside it. Then nothing above is said of it.
    """

    tile: int
    linear: Padding
    attention: Padding
    pad_kv: bool
    product_tile: int = TILE_ROWS
    product_multiple: int = TILE_ROWS
    product_slots: int = 0
    by_row: bool = False

    def product_rows(self, num_rows: int) -> int:
        """Rows that a product of `num_rows` of them must have."""
        if num_rows <= self.tile:
            return self.linear.rows(num_rows)
        return Padding(1, self.product_multiple).rows(num_rows)

    def step_rows(self, num_rows: int) -> int:
        """Rows that a step must have so that each of its products is padded by rows that exist."""
        rest = num_rows % self.product_tile
        return num_rows - rest + (self.product_rows(rest) if rest else 0)


NATURAL = RowRules(2**31, Padding(1, 1), Padding(1, 1), False, 2**31, 1)

PRODUCT_SLOTS = 8192
"""Attention by products is checked, and used, over at most so many slots."""

# Whole spans even here: what is attended to then lies in one piece and is not copied.
NATURAL_DECODER = RowRules(128, Padding(1, 1), Padding(1, 1), True, 2**31, 1, PRODUCT_SLOTS)
NATURAL_KERNELS = replace(NATURAL, by_row=True)


@dataclass(frozen=True, slots=True)
class Tiling:
    """The rules in force while a runner drives a model on this thread."""

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


def current_rules() -> RowRules:
    """The rules in force on this thread; the natural ones where no runner is driving."""
    tiling = _tiling.get()
    return NATURAL if tiling is None else tiling.rules


def tiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`functional.linear` under the rules in force: x [..., in] to [..., out]."""
    tiling = _tiling.get()
    if tiling is None:
        return functional.linear(x, weight, bias)
    rules = tiling.rules
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= rules.product_tile and num_rows == rules.product_rows(num_rows):
        return functional.linear(x, weight, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    output = x.new_empty(num_rows, weight.shape[0])
    for start in range(0, num_rows, rules.product_tile):
        part = rows[start : start + rules.product_tile]
        count = part.shape[0]
        if padding := rules.product_rows(count) - count:
            part = functional.pad(part, (0, 0, 0, padding))
        output[start : start + count] = functional.linear(part, weight, bias)[:count]
        tiling.progress()
    return output.view(*x.shape[:-1], weight.shape[0])


def numerics_fingerprint(dtype: torch.dtype, device: torch.device, rules: RowRules, way: str) -> str:
    """sha256 over everything that decides how numbers round. Equal fingerprints: equal bits for equal inputs.

    `way`: which code computes the pass, the model's own modules or a decoder with weights of its own layout.

    The number of compute threads is one of these things, and is taken as it is now: it is set once, by `load_model`.
    After a later change (`torch.set_num_threads`) a new runner is needed.
    """
    if device.type == "cuda":
        unit = f"{torch.cuda.get_device_name(device)} {torch.version.cuda}"
    else:
        unit = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_features()}"
    facts = (
        str(dtype),
        device.type,
        unit,
        torch.__version__,
        str(torch.version.git_version),
        f"threads={torch.get_num_threads()}",
        way,
        repr(rules),
    )
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()


def _cpu_features() -> str:
    """The CPU's model and vector extensions as the kernel lists them; empty where it does not."""
    facts = cpu_facts()
    if not facts:
        return platform.processor()
    kind = [facts[name] for name in ("vendor_id", "cpu family", "model") if name in facts]
    return " ".join([*kind, *sorted(flag for flag in cpu_flags() if flag.startswith(("avx", "amx", "fma", "sse")))])
