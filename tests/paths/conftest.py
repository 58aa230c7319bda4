"""The first cases of the suite, played once for all tests that look at them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.paths.path_findings import Findings, play_cases

NUM_CASES = 500


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the suite's models and tables lie."""
    return tmp_path_factory.mktemp("paths")


@pytest.fixture(scope="session")
def findings(models: Path) -> Findings:
    return asyncio.run(play_cases(models, range(NUM_CASES)))
