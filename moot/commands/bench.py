"""`moot bench NAME`: run one of the measurements in the repository's lab/bench folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moot.core.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "lab" / "bench"
# Shared code of the measurements, not one itself.
_LIBRARIES = ("__init__", "intervals", "report", "scripted_peers")


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in _LIBRARIES)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        known = "".join(f"\n  {name}" for name in names()) or "\n  (none: lab/bench is part of the repository only)"
        print(f"usage: moot bench NAME [FLAGS]\n\nmeasurements:{known}\n\nexample:\n  moot bench verify_time --help")
        return 0 if argv else 2
    if argv[0] not in names():
        raise ConfigError(f"no measurement {argv[0]} in {FOLDER} (known: {', '.join(names())})")
    os.chdir(FOLDER.parents[1])
    os.execv(sys.executable, [sys.executable, "-m", f"lab.bench.{argv[0]}", *argv[1:]])
