"""Drafters as a command line names them: `[id=]kind[:option=value]...`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moot.core.errors import ConfigError

INSIDE_KINDS = ("heads", "lookahead", "self")
"""Kinds that live inside the verifier (moot.proposers.inside)."""


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    drafter_id: str
    kind: str
    options: dict[str, str]

    def __str__(self) -> str:
        """As parse_entries takes it."""
        options = [f":{name}={value}" for name, value in self.options.items()]
        return f"{self.drafter_id}={self.kind}" + "".join(options)


def parse_entries(entries: Iterable[str], flag: str) -> list[DrafterEntry]:
    """One per entry, in order. Raises ConfigError naming `flag` and the bad entry, or an id that is given twice."""
    found: list[DrafterEntry] = []
    for entry in entries:
        head, *options = entry.split(":")
        drafter_id, separator, kind = head.partition("=")
        kind = kind if separator else drafter_id
        pairs = [option.partition("=") for option in options]
        if not kind or not drafter_id or any(not separator for _, separator, _ in pairs):
            raise ConfigError(f"{flag}: {entry!r} is not [id=]kind[:option=value]...")
        if any(one.drafter_id == drafter_id for one in found):
            raise ConfigError(f"{flag}: {drafter_id} is named twice")
        found.append(DrafterEntry(drafter_id, kind, {name: value for name, _, value in pairs}))
    return found
