"""Named fault points for the fault tests: places in the real code that can be told to fail.

Inactive, and one dictionary look-up, unless the environment variable MOOT_FAULTS names them:
`MOOT_FAULTS="verifier.step=delay:0.5;verifier.logits=nan@req-7;drafter.propose=lie"`. A point is `name=action`,
with an argument after a colon and, after an at sign, the request ids that it applies to: one, or a pattern with `*`
(ids begin with the API's kind and end with the choice's number). The meaning of an action is the place's own;
`act` serves the common ones `delay:SECONDS`, `freeze` and `exit`, which ends the process at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from moot.core.errors import ConfigError

FREEZE_S = 3600.0
"""A frozen place sleeps this long: longer than every deadline, yet not for ever."""

EXIT_STATUS = 86
"""Of a process that the action `exit` has ended."""


@dataclass(frozen=True, slots=True)
class Fault:
    action: str
    argument: str = ""
    target: str = ""


def parse_faults(text: str) -> dict[str, Fault]:
    """`name=action[:argument][@target]` separated by semicolons. Raises ConfigError naming the bad part."""
    faults: dict[str, Fault] = {}
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, separator, rest = part.partition("=")
        if not separator or not rest:
            raise ConfigError(f"MOOT_FAULTS: {part!r} is not name=action[:argument][@target]")
        head, _, target = rest.partition("@")
        action, _, argument = head.partition(":")
        faults[name] = Fault(action, argument, target)
    return faults


_active: Mapping[str, Fault] = parse_faults(os.environ.get("MOOT_FAULTS", ""))


def fault(name: str, target: str = "") -> Fault | None:
    """The fault set for this place (and this request or session), or None. One without a target applies to all."""
    if not _active:
        return None
    found = _active.get(name)
    return found if found is not None and (not found.target or fnmatchcase(target, found.target)) else None


def fault_delay_s(found: Fault | None) -> float:
    """Seconds for which the place is to stand still: of `delay:SECONDS`, `freeze`, else 0."""
    if found is None:
        return 0.0
    if found.action == "freeze":
        return FREEZE_S
    return float(found.argument) if found.action == "delay" else 0.0


def act(found: Fault | None) -> None:
    """Do what the common actions say; nothing for any other. Blocks the calling thread."""
    if found is None:
        return
    if found.action == "exit":
        os._exit(EXIT_STATUS)
    if seconds := fault_delay_s(found):
        time.sleep(seconds)
