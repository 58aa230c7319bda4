from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.router.store.store_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server of this test's own: it may be killed."""
    made = Server(tmp_path)
    yield made
    made.kill()


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for tests that only use it."""
    made = Server(tmp_path_factory.mktemp("server"))
    yield made
    made.kill()
