"""What tests of the model runtime may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.driving import threads


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads."""
    with threads(1):
        yield
