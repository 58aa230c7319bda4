"""What processes show of themselves: samples of their metrics, their CPU time and their memory."""

from __future__ import annotations

import math
import os
import urllib.request
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from moot.commands.system import System


def _samples_of(port: int) -> list[Any]:
    """Everything that the process with this metrics port shows."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def metrics_of(port: int) -> dict[tuple[str, str], float]:
    """(name, `le` or the only other label's value, else empty) to value, of the process with this metrics port."""
    return {(sample.name, ",".join(sample.labels.values())): sample.value for sample in _samples_of(port)}


Samples = dict[tuple[str, str, str], float]
"""By name, label `stage` and label `le`; the labels are empty where a sample has none."""


def scrape(port: int) -> Samples:
    """Every sample of the router's metrics without other labels than these."""
    return {
        (sample.name, sample.labels.get("stage", ""), sample.labels.get("le", "")): sample.value
        for sample in _samples_of(port)
        if set(sample.labels) <= {"stage", "le"}
    }


def gained(before: Samples, after: Samples, name: str, stage: str = "") -> float:
    return after[name, stage, ""] - before.get((name, stage, ""), 0.0)


def lengths_asked(before: Samples, after: Samples) -> dict[int, float]:
    """How many rounds between two scrapes of a router asked for each K."""
    name = "moot_speculation_length_bucket"
    reached = sorted((float(key[2]), value - before.get(key, 0.0)) for key, value in after.items() if key[0] == name)
    found, below = {}, 0.0
    for bound, count in reached:
        if not math.isinf(bound) and count > below:
            found[int(bound)] = count - below
        below = count
    return found


def median_of(before: Samples, after: Samples, name: str, stage: str) -> float:
    """The median of what a histogram gained, as if values lay evenly inside a bucket. NaN where it gained nothing."""
    rows = [
        (float(le), value - before.get(key, 0.0))
        for key, value in after.items()
        if (le := key[2]) and key[:2] == (name + "_bucket", stage)
    ]
    low, below, half = 0.0, 0.0, max((reached for _, reached in rows), default=0.0) / 2
    for bound, reached in sorted(rows):
        if reached >= half > 0:
            return bound if math.isinf(bound) else low + (bound - low) * (half - below) / (reached - below)
        low, below = bound, reached
    return math.nan


def process_ids(system: System) -> dict[str, int]:
    """Every process of the system by its name."""
    return {child.name: child.process.pid for child in system.supervisor.children}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_of(pid: int) -> tuple[int, int]:
    """Resident and proportional set size, in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:] if line.endswith("kB")}
    return sizes["Rss"], sizes["Pss"]
