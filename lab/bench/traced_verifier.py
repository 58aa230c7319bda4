"""The real verifier process with its steps recorded: see moot.runtime.tracing. Flags are those of services.verifier."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from moot.runtime import tracing
from services.verifier import __main__ as program
from services.verifier.step import Item, StepRunner
from services.verifier.walks import Outcome

_run = StepRunner.run


def _traced(self: StepRunner, items: Sequence[Item]) -> list[Outcome]:
    with tracing.span("verify", num_requests=len(items)):
        return _run(self, items)


if __name__ == "__main__":
    StepRunner.run = _traced  # type: ignore[method-assign]
    sys.exit(program.main())
