"""The chart's scenarios, which most tests of rendered objects look at one by one."""

from __future__ import annotations

import pytest

from tests.deploy.charts import SCENARIOS, Release, rendered


@pytest.fixture(params=SCENARIOS)
def scenario(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def release(scenario: str) -> Release:
    return rendered(scenario)
