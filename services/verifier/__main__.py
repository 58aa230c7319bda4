"""`python -m services.verifier --model PATH`: the target model as a service."""

from __future__ import annotations

import os
import sys

# Before torch is imported: a thread that waits for the next piece of a step watches for it for a moment (libgomp counts
# turns, some tenths of a millisecond; Intel's OpenMP milliseconds), then sleeps, because others share the cores.
# What was measured: docs/performance.md.
os.environ.setdefault("GOMP_SPINCOUNT", "4000")
os.environ.setdefault("KMP_BLOCKTIME", "1")

import asyncio

from moot.config import load_config
from moot.core.errors import MootError
from moot.runtime.logs import setup_logging
from services.verifier.config import VerifierConfig


def main(argv: list[str] | None = None) -> int:
    try:
        config = load_config(
            VerifierConfig,
            sys.argv[1:] if argv is None else argv,
            prog="python -m services.verifier",
            description="Serve a target model: it decides every token.",
            example="python -m services.verifier --model ./model --port 7100",
        )
        from services.verifier.service import serve  # brings torch: help and wrong flags are answered before

        setup_logging("verifier", config.service.log_level)
        return asyncio.run(serve(config))
    except MootError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
