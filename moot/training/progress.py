"""A progress bar with rate and time left, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm  # type: ignore[import-untyped]


@contextmanager
def progress_bar(what: str, unit: str, total: int, done: int = 0) -> Iterator[Any]:
    """Yields an object with `update(count)` and `set_postfix_str(text)`. Where standard error is no terminal a line
    appears every half minute."""
    seconds = 0.2 if sys.stderr.isatty() else 30.0
    bar = tqdm(
        desc=what, unit=unit, total=total, initial=done, unit_scale=True, mininterval=seconds, maxinterval=seconds,
        file=sys.stderr, dynamic_ncols=True, smoothing=0.05,
    )  # fmt: skip
    try:
        yield bar
    finally:
        bar.close()
