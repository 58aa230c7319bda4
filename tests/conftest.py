"""Which tests a plain `pytest` runs."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `-m` the tests marked `long` are left out, unless MOOT_CASES says how many cases they are to have."""
    if config.option.markexpr or "MOOT_CASES" in os.environ:
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
