"""The real verifier process with its steps recorded: see moot.trace. Flags are those of services.verifier."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moot import trace
from services.verifier import __main__ as program
from services.verifier.outcomes import Outcome
from services.verifier.step import Item, StepRunner

_run = StepRunner.run


def _traced(self: StepRunner, items: Sequence[Item]) -> list[Outcome]:
    with trace.span("verify", num_requests=len(items)):
        return _run(self, items)


if __name__ == "__main__":
    StepRunner.run = _traced  # type: ignore[method-assign]
    sys.exit(program.main())
