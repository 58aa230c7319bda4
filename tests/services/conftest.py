"""What tests of services may ask for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from moot.runtime import faults


@pytest.fixture
def set_faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Switches fault points of this process, as MOOT_FAULTS names them, until the test ends."""
    return lambda text: monkeypatch.setattr(faults, "_active", faults.parse_faults(text))
