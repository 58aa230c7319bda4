"""What every measurement shares: the machine's description, and one result as JSON, as Markdown and as a picture."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """CPU, cores, memory in GiB, GPU where torch is loaded and has one, and the versions that matter."""
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
    torch = sys.modules.get("torch")
    has_gpu = torch is not None and torch.cuda.is_available()
    return {
        "cpu": model,
        "cpu_features": features,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory, 1),
        "gpu": torch.cuda.get_device_name() if torch is not None and has_gpu else "none",
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


def publish(
    name: str,
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    facts: Mapping[str, Any],
    draw: Callable[[Any], None] | None = None,
    script: str | None = None,
) -> None:
    """Print the table; write `results/NAME.json` and `.md` with the command, the machine and `facts`.

    `draw` gets a matplotlib Figure to fill, which is kept as `results/NAME.png`. `script`: the module of
    bench that was run, where one script has several results; None: it is called as its result.
    """
    RESULTS.mkdir(exist_ok=True)
    here = machine()
    command = " ".join([Path(sys.executable).name, "-m", f"lab.bench.{script or name}", *map(_shown, sys.argv[1:])])
    (RESULTS / f"{name}.json").write_text(json.dumps({"command": command, "machine": here, **facts}, indent=1))
    described = ", ".join(f"{key} {value}" for key, value in here.items() if value != [])
    text = f"`{command}`\n\n{described}\n\n{table(header, rows)}\n"
    (RESULTS / f"{name}.md").write_text(text)
    print(text)
    if draw is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 5), layout="constrained")
        draw(figure)
        figure.savefig(RESULTS / f"{name}.png", dpi=120)
        print(f"picture: {RESULTS / name}.png")


def _shown(argument: str) -> str:
    """An argument as a reader can use it: of a path only its last part, which says what was taken, not from where.

    Paths may be several, separated by commas.
    """
    return ",".join(Path(part).name if os.sep in part and Path(part).exists() else part for part in argument.split(","))
