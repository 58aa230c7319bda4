"""Where things are kept between runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """MOOT_CACHE, by default ~/.cache/moot."""
    return Path(environ.get("MOOT_CACHE") or "~/.cache/moot").expanduser()
