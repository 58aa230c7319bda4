"""Compiles the kernels once per source, and finds them again: beside the source, else under the cache directory.

    python -m moot.model.native.build

builds them beside the source, as an image does that has no compiler where it runs.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger("moot.model")

SOURCE = Path(__file__).with_name("kernels.c")
# No -march=native: one build serves every CPU that has what the kernels use. Without contraction what is written is
# what is rounded.
FLAGS = (
    *("-O3", "-std=gnu11", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off"),
    *("-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16"),
)
CPU_FLAGS = frozenset({"fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
"""What a CPU must have, as Linux lists it."""

_TIMEOUT_S = 120.0


def source_digest() -> str:
    """Of source and flags: which numbers the kernels give."""
    return hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:16]


def find_or_build(cache: Path) -> Path | None:
    """The compiled kernels, or None where they can neither be found nor built; the log then says why."""
    name = f"kernels-{source_digest()}.so"
    for folder in (SOURCE.parent, cache / "native"):
        if (folder / name).is_file():
            return folder / name
    try:
        return build(cache / "native" / name)
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or error
        _log.warning("kernels are not compiled, passes take longer: %s", str(reason).strip().splitlines()[-1:])
        return None


def build(target: Path) -> Path:
    """Compile with gcc, or what CC names. Raises OSError or subprocess.SubprocessError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        command = [os.environ.get("CC") or "gcc", *FLAGS, "-o", unfinished, str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
        # A temporary file is its owner's alone, and an image runs as another user than built it.
        os.chmod(unfinished, 0o755)
        # Processes that start together each compile, and any result is as good as the other.
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)
    return target


if __name__ == "__main__":
    print(build(SOURCE.with_name(f"kernels-{source_digest()}.so")))
