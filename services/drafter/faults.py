"""The fault point `drafter.propose`: a drafter that is slow, frozen, lying or talking garbage. For fault tests.

`delay:SECONDS` and `freeze` stand still before drafting; `lie` answers random ids; `garbage[:form]` answers what no
drafter may: form `range` (ids outside the vocabulary), `long` (more than asked for), `empty` (a proposal without
ids), `confidences` (too few of them); without a form, one after the other. `memory:SESSIONS` has no memory to draft for
more than so many at once. After `@` a request id limits it to that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from moot.faults import fault, fault_delay_s
from moot.proposers.base import Chain
from services.drafter.commands import Propose

POINT = "drafter.propose"
FORMS = ("range", "long", "empty", "confidences")


def delay_s(request_ids: Sequence[str]) -> float:
    """Seconds to stand still before drafting for these requests."""
    return max((fault_delay_s(fault(POINT, request_id)) for request_id in request_ids), default=0.0)


def shortage(num_sessions: int) -> None:
    """Raises MemoryError where there is to be none for so many."""
    found = fault(POINT)
    if found is not None and found.action == "memory" and num_sessions > int(found.argument):
        raise MemoryError(f"fault point {POINT}")


def corrupted(chains: list[Chain], ask: Propose, request_id: str, vocab_size: int) -> list[Chain]:
    """`chains`, or what the fault makes of them."""
    found = fault(POINT, request_id)
    if found is None or found.action not in ("lie", "garbage"):
        return chains
    length = max(ask.num_speculative_tokens, 1)
    if found.action == "lie":
        rng = random.Random(ask.base_length)
        return [Chain(tuple(rng.randrange(vocab_size) for _ in range(length)), (255,) * length)]
    form = found.argument or FORMS[ask.round_index % len(FORMS)]
    if form == "range":
        return [Chain((vocab_size + 7,) * length, (255,) * length)]
    if form == "long":
        return [Chain((0,) * (3 * length + 1), (255,) * (3 * length + 1))]
    if form == "empty":
        return [Chain((), ())]
    return [Chain((0,) * length, (255,) * (length - 1))]
