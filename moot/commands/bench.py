"""`moot bench NAME`: run one of the measurements in the repository's lab/bench folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from moot.core.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "lab" / "bench"
_DECLARATION = "\nBENCH = Bench("


def names() -> list[str]:
    """Names of the modules, and of the packages with a `__main__`, that declare themselves a bench."""
    declared = [path for path in FOLDER.glob("*/*.py") if _DECLARATION in path.read_text()]
    return sorted(path.parent.name if path.stem == "__main__" else path.stem for path in declared)


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        known = "".join(f"\n  {name}" for name in names()) or "\n  (none: lab/bench is part of the repository only)"
        print(f"usage: moot bench NAME [FLAGS]\n\nmeasurements:{known}\n\nexample:\n  moot bench verify_time --help")
        return 0 if argv else 2
    if argv[0] not in names():
        raise ConfigError(f"no measurement {argv[0]} in {FOLDER} (known: {', '.join(names())})")
    os.chdir(FOLDER.parents[1])
    os.execv(sys.executable, [sys.executable, "-m", f"lab.bench.{argv[0]}", *argv[1:]])
