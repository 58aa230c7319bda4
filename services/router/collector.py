"""Python's cyclic garbage collector, told what a router's memory is like."""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""Objects more than were there at the last collection, until the youngest are looked at; and the same for the elder
two generations, in collections of the one before. Rounds free what they make by reference counts and leave no cycles,
so that Python's own 700 finds nothing, each few rounds, at a quarter of the router's time."""


def settle() -> None:
    """What is there after the start (tokenizer, libraries) stays until the end: it is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
