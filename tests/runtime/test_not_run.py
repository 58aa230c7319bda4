"""What a run of tests says of those that it left out."""

from __future__ import annotations

from tests.not_run import summed_up


def test_what_the_same_command_brings_is_told_together() -> None:
    """Each reason once, counted, the most frequent first; one that no command mends is told as it is."""
    reasons = ["helm3 is not there: make tools", "helm4 is not there: make tools", "this CPU has no tiles"]
    assert summed_up([*reasons, reasons[0]]) == (
        "4 tests did not run: 3 helm3 is not there, helm4 is not there: make tools; 1 this CPU has no tiles"
    )
