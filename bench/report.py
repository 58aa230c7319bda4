"""What every measurement shares: the machine's description, medians with spread, JSON beside Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """CPU, cores, memory in GiB, and the versions that matter."""
    features: list[str] = []
    try:
        text = Path("/proc/cpuinfo").read_text()
        flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
        features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
        model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    except OSError:
        model = platform.processor()
    versions = {}
    for name in ("torch", "transformers", "grpcio", "redis", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cpu": model,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "python": platform.python_version(),
        **versions,
    }


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lowest, highest."""
    return statistics.median(values), min(values), max(values)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def publish(name: str, header: Sequence[str], rows: Sequence[Sequence[object]], facts: Mapping[str, Any]) -> None:
    """Print the table; write `results/NAME.json` with the command, the machine and `facts`."""
    RESULTS.mkdir(exist_ok=True)
    here = machine()
    document = {"command": " ".join([Path(sys.executable).name, "-m", f"bench.{name}", *sys.argv[1:]]), "machine": here}
    (RESULTS / f"{name}.json").write_text(json.dumps({**document, **facts}, indent=1))
    print(", ".join(f"{key} {value}" for key, value in here.items() if value != []))
    print()
    print(table(header, rows))
