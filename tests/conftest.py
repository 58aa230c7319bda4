"""Which tests a plain `pytest` runs, and how those that are coroutines; that no property is measured by a clock, and a
last line on what did not run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os

import pytest
from hypothesis import HealthCheck, settings

from tests.not_run import summed_up
from tests.waiting import LeapingLoop

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


@pytest.fixture
def loop() -> LeapingLoop:
    """The loop of a test that is a coroutine and sets its clock forward."""
    return LeapingLoop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs on a loop of its own, the one that it asked for or a new one. Of its fixtures,
    async context managers are entered there."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    factory = (lambda: arguments["loop"]) if "loop" in arguments else None

    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, contextlib.AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await pyfuncitem.obj(**arguments)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
    return True


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
