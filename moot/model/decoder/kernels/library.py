"""The compiled kernels as functions of tensors: compiled once per source, found again, loaded, called.

They lie beside the source, else under the cache directory. The classes of ctypes mirror the structures of kernels.c.

    python -m moot.model.decoder.kernels.library

builds all variants beside the source, as an image does that has no compiler where it runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import subprocess
import tempfile
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moot.model.rows import cpu_flags

_log = logging.getLogger("moot.model")

SOURCE = Path(__file__).with_name("kernels.c")


@dataclass(frozen=True, slots=True)
class Variant:
    """The kernels for one set of instructions, as the compiler names them and as Linux lists them of a CPU. No
    -march=native: one build serves every CPU that has what the kernels use."""

    name: str
    instructions: tuple[str, ...]
    cpu_flags: frozenset[str]

    @property
    def flags(self) -> tuple[str, ...]:
        """Flags for the compiler. Without contraction what is written is what is rounded."""
        common = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off")
        return (*common, *(f"-m{name}" for name in self.instructions))

    @property
    def digest(self) -> str:
        """Digest of sources and flags: it tells which numbers the kernels give."""
        sources = SOURCE.read_bytes() + SOURCE.with_name(f"{self.name}.h").read_bytes()
        return hashlib.sha256(sources + " ".join(self.flags).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.name} {self.digest}"

    @property
    def file_name(self) -> str:
        return f"kernels-{self.digest}.so"


VARIANTS = (
    Variant(
        "avx512",
        ("fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"),
        frozenset({"fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    ),
    Variant("avx2", ("fma", "avx2"), frozenset({"fma", "avx2"})),
)
"""The fastest first."""

_TIMEOUT_S = 120.0


def find_or_build(cache: Path, variant: Variant) -> Path | None:
    """The compiled kernels, or None where they can neither be found nor built; the log then says why."""
    for folder in (SOURCE.parent, cache / "native"):
        if (folder / variant.file_name).is_file():
            return folder / variant.file_name
    try:
        return build(cache / "native" / variant.file_name, variant)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("kernels are not compiled, passes take longer: %s", str(reason).strip().splitlines()[-1:])
        return None


def build(target: Path, variant: Variant) -> Path:
    """Compile with gcc, or what CC names. Raises OSError or subprocess.SubprocessError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [os.environ.get("CC") or "gcc", *variant.flags, "-o", unfinished, str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        # A temporary file is its owner's alone, and an image runs as another user than built it.
        os.chmod(unfinished, 0o755)
        # Processes that start together each compile, and any result is as good as the other.
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    for each in VARIANTS:
        print(build(SOURCE.with_name(each.file_name), each))


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


MOST_DIM = 256
"""Elements of a head at most."""

HALF, GATED, SINGLE = range(3)
"""What a product gives, as kernels.c numbers it."""


class Kernels:
    """The compiled kernels. Called by one thread at a time. All tensors are contiguous; widths are multiples of 16,
    head sizes of 32."""

    def __init__(self, library: Path, variant: Variant) -> None:
        loaded = ctypes.CDLL(str(library))
        self._norm, self._product = loaded.moot_norm, loaded.moot_product
        self._attend, self._layer = loaded.moot_attend, loaded.moot_layer
        reference = ctypes.POINTER
        self._norm.argtypes = (reference(CNorm), _pointer, _pointer, _pointer, _int, _int, ctypes.c_int)
        self._product.argtypes = (reference(CWeight), _pointer, _pointer, _int, ctypes.c_int, ctypes.c_int)
        self._attend.argtypes = (reference(CPlan), reference(CAttention), _int, _pointer)
        self._layer.argtypes = (reference(CPlan), reference(CLayer), _int, reference(CNorm), reference(CRows))
        for function in (self._norm, self._product, self._attend, self._layer):
            function.restype = None
        self.variant = variant
        self.outputs = int(loaded.moot_outputs())
        """Outputs of a product whose weights lie together."""

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


def allowed_variant(flags: Set[str]) -> Variant | None:
    """The fastest kernels for a CPU with these flags, or those that MOOT_KERNELS names, where it allows them."""
    name = os.environ.get("MOOT_KERNELS")
    return next((each for each in VARIANTS if each.cpu_flags <= flags and name in (None, each.name)), None)


def load_kernels(cache: Path) -> Kernels | None:
    """The kernels, compiled first where need be; None where this CPU or a missing compiler does not allow them."""
    variant = allowed_variant(cpu_flags())
    return None if variant is None else _loaded(cache, variant)


@functools.cache
def _loaded(cache: Path, variant: Variant) -> Kernels | None:
    library = find_or_build(cache, variant)
    if library is None:
        return None
    try:
        return Kernels(library, variant)
    except (OSError, AttributeError) as error:
        _log.warning("kernels cannot be loaded, passes take longer: %s", error)
        return None
