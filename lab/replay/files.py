"""Arrays in one file, written in one go: a recording that is interrupted leaves the last whole state."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moot.core.errors import ConfigError


def save_arrays(path: Path, **arrays: NDArray[Any]) -> None:
    """A compressed npz file without pickles, in place of the one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
    temporary.replace(path)


def load_arrays(path: Path, what: str) -> dict[str, NDArray[Any]]:
    """Raises ConfigError, naming `what`, for a file that is missing or broken."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"cannot open {what} {path}: {error}") from error
