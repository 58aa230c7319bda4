"""What drafters weigh in the vote before anything is known of them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from moot.core.errors import ConfigError


def parse_priors(entries: Iterable[str]) -> dict[str, float]:
    """`id=number` entries by drafter id, whether there is such a drafter yet or not. Raises ConfigError naming the bad
    one."""
    priors: dict[str, float] = {}
    for entry in entries:
        drafter_id, _, text = entry.rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not drafter_id or not (0 < number < math.inf):
            raise ConfigError(f"--drafter-priors: {entry!r} is not id=number, above 0 and finite")
        if drafter_id in priors:
            raise ConfigError(f"--drafter-priors: {drafter_id} is named twice")
        priors[drafter_id] = number
    return priors
