"""What every test of a system leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def whole_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test of a rig leaves a system that holds nothing and that has healed."""
    rig = request.getfixturevalue("rig") if "rig" in request.fixturenames else None
    yield
    if rig is not None:
        rig.system.assert_idle()
        rig.system.heal()
        rig.system.assert_idle()
