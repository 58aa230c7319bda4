"""Drafters that come with the package: `shipped@NAME` wherever the folder of a drafter is named.

Where things are kept between runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moot.core.errors import ConfigError


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """MOOT_CACHE, by default ~/.cache/moot."""
    return Path(environ.get("MOOT_CACHE") or "~/.cache/moot").expanduser()


PREFIX = "shipped@"
FOLDER = Path(__file__).parent / "data" / "drafters"


def shipped_names() -> tuple[str, ...]:
    """Sorted; each is `KIND-TARGET`, a folder with a model card (README.md)."""
    return tuple(sorted(card.parent.name for card in FOLDER.glob("*/README.md")))


def locate(path: str | Path) -> Path:
    """The folder of a shipped drafter, or `path` itself where it names none. Raises ConfigError naming those there are.

    A folder of your own whose name begins so is meant by `./shipped@NAME`.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    name = text.removeprefix(PREFIX)
    if name not in shipped_names():
        raise ConfigError(f"no drafter {text} comes with the package (there is {', '.join(shipped_names()) or 'none'})")
    return FOLDER / name
