"""What processes show of themselves: samples of their metrics, and their memory."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from moot.commands.system import System


def metrics_of(port: int) -> dict[tuple[str, str], float]:
    """(name, `le` or the only other label's value, else empty) to value, of the process with this metrics port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def lengths_asked(before: dict[tuple[str, str], float], after: dict[tuple[str, str], float]) -> dict[int, float]:
    """How many rounds between two scrapes of a router asked for each K."""
    name = "moot_speculation_length_bucket"
    bounds = sorted(float(label) for key, label in after if key == name)
    counts = [after[name, _label(after, bound)] - before.get((name, _label(after, bound)), 0.0) for bound in bounds]
    found, below = {}, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if bound != float("inf") and count > below:
            found[int(bound)] = count - below
        below = count
    return found


def _label(samples: dict[tuple[str, str], float], bound: float) -> str:
    return next(label for key, label in samples if key == "moot_speculation_length_bucket" and float(label) == bound)


def process_ids(system: System) -> dict[str, int]:
    """Every process of the system by its name."""
    return {child.name: child.process.pid for child in system.supervisor.children}


def memory_of(pid: int) -> tuple[int, int]:
    """Resident and proportional set size, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:] if line.endswith("kB")}
    return sizes["Rss"], sizes["Pss"]
