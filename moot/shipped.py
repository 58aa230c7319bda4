"""Drafters that come with the package: `shipped@NAME` wherever the folder of a drafter is named."""

from __future__ import annotations

from pathlib import Path

from moot.core.errors import ConfigError

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
