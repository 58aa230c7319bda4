"""Which tests a plain `pytest` runs, that no property is measured by a clock, and a last line on what did not run."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests.not_run import summed_up

# How long an example takes is the machine's affair.
settings.register_profile("anywhere", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("anywhere")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `-m` the tests marked `long` are left out, unless MOOT_CASES says how many cases they are to have."""
    if config.option.markexpr or "MOOT_CASES" in os.environ:
        return
    left_out = [item for item in items if item.get_closest_marker("long")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Behind pytest's own last line: how many tests did not run, why, and what brings them."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    reasons = [report.longrepr[2].removeprefix("Skipped: ") for report in reporter.stats.get("skipped", ())]
    is_long = [item.get_closest_marker("long") for item in reporter.stats.get("deselected", ())]
    reasons += ["more cases of the same properties: make test-long"] * sum(marker is not None for marker in is_long)
    if reasons:
        reporter.write_line(summed_up(reasons))
