"""Helpers of the commands: folders of runs, command lines as they are written down, tables, progress."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moot.shipped import cache_dir

DEMO_MODEL = "smollm2-135m-instruct"
"""The target of every command that is told no other."""
DEFAULT_SEED = 0
KEPT_RUNS = 5
"""Folders with the logs of earlier runs; older ones are removed."""


def say(text: str) -> None:
    """Progress goes to standard error, so that output can be piped."""
    print(f"  {text}", file=sys.stderr, flush=True)


def command_of(command: str, config: Any, names: Sequence[str]) -> str:
    """The call with the named flags of `config`, as one writes it down: files and folders by their names alone."""
    argv = ["moot", command]
    for name in names:
        value = getattr(config, name)
        if value is not None:
            argv += [f"--{name}", Path(value).name if isinstance(value, Path) else str(value)]
    return shlex.join(argv)


def run_folder(name: str) -> Path:
    """A new folder for this run's logs."""
    runs = cache_dir() / "run"
    runs.mkdir(parents=True, exist_ok=True)
    earlier = sorted((path for path in runs.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in earlier[: -KEPT_RUNS or None]:
        if not _is_running(path):
            shutil.rmtree(path, ignore_errors=True)
    folder = runs / f"{name}-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _is_running(folder: Path) -> bool:
    """Whether the process that the folder is named after still lives."""
    pid = folder.name.rpartition("-")[2]
    return pid.isdigit() and Path(f"/proc/{pid}").exists()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns: the first to the left, the others, which are numbers, to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
