"""Each peer's own virtual environment, made from pinned requirements by pip, and the files its children read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from lab.bench.peers.protocol import LAST_LINES, PeerFailed

REQUIREMENTS = Path(__file__).parent / "requirements"
DONE = "installed.txt"
INSTALL_TIMEOUT_S = 3600.0
# What `native` would choose here is built for more than the machine runs, and dies with an illegal instruction.
_SWITCHES = {
    "GGML_AVX": "avx",
    "GGML_AVX2": "avx2",
    "GGML_FMA": "fma",
    "GGML_F16C": "f16c",
    "GGML_BMI2": "bmi2",
    "GGML_AVX512": "avx512f",
    "GGML_AVX512_VBMI": "avx512vbmi",
    "GGML_AVX512_VNNI": "avx512_vnni",
    "GGML_AVX512_BF16": "avx512_bf16",
}


def build_flags(cpu_flags: set[str]) -> str:
    """CMake arguments of llama.cpp for a processor with these flags (as /proc/cpuinfo names them)."""
    switches = [f"-D{switch}={'ON' if flag in cpu_flags else 'OFF'}" for switch, flag in _SWITCHES.items()]
    return " ".join(["-DGGML_NATIVE=OFF", *switches])


def interpreter(environment: str, folder: Path) -> Path:
    """The environment's Python; made when it is not there or its requirements changed. Raises PeerFailed."""
    if not environment:
        return Path(sys.executable)
    home, wanted = folder / environment, REQUIREMENTS / f"{environment}.txt"
    python = home / "bin" / "python"
    done = home / DONE
    if done.is_file() and done.read_text() == wanted.read_text():
        return python
    print(f"installing {environment} into {home} (minutes, once)", flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(home)])
    # Not resolved anew: the lists are whole, and some packages ask for others that do not fit this torch.
    _run([str(python), "-m", "pip", "install", "--no-deps", "--requirement", str(wanted)])
    done.write_text(wanted.read_text())
    return python


def _run(command: list[str]) -> None:
    try:
        cpu_flags = set(Path("/proc/cpuinfo").read_text().split())
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_TIMEOUT_S,
            env={**os.environ, "CMAKE_ARGS": build_flags(cpu_flags)},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"not installed: {error}") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()
        raise PeerFailed("\n".join(["not installed", *lines[-LAST_LINES:]]))
