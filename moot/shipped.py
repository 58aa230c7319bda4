"""Trained drafters by name (`shipped@NAME` wherever the folder of a drafter is named), and the folder of caches."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from moot.core.errors import ConfigError


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of caches: MOOT_CACHE, by default ~/.cache/moot."""
    return Path(environ.get("MOOT_CACHE") or "~/.cache/moot").expanduser()


PREFIX = "shipped@"
PACKAGED = Path(__file__).parent / "data" / "drafters"
"""Drafters that defaults use: they come with the package."""
WORKSHOP = Path(__file__).parents[1] / "lab" / "data" / "drafters"
"""Drafters that no default uses: they come with the repository."""


def shipped_drafters() -> dict[str, Path]:
    """Shipped drafters, name to folder, sorted: with the package, with the repository, and put under
    `cache_dir()/drafters` by hand.

    Each name is `KIND-TARGET`; each folder has a model card (README.md).
    """
    found: dict[str, Path] = {}
    for folder in (cache_dir() / "drafters", WORKSHOP, PACKAGED):
        found |= {card.parent.name: card.parent for card in folder.glob("*/README.md")}
    return dict(sorted(found.items()))


def locate(path: str | Path) -> Path:
    """The folder of a shipped drafter, or `path` itself where it names none. Raises ConfigError naming the known ones.

    A folder of your own whose name begins so is meant by `./shipped@NAME`.
    """
    text = str(path)
    if not text.startswith(PREFIX):
        return Path(path)
    known = shipped_drafters()
    if (folder := known.get(text.removeprefix(PREFIX))) is None:
        raise ConfigError(
            f"no drafter {text} is here (there is {', '.join(known) or 'none'}); folders of lab/data/drafters in the"
            f" repository are also found in {cache_dir() / 'drafters'}"
        )
    return folder
