"""`python -m services.verifier --model PATH`: the target model as a service."""

from __future__ import annotations

import os
import sys

# Before torch is imported: threads that wait for work sleep instead of spinning, because drafters share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import asyncio

from moot.config import load_config
from moot.core.errors import MootError
from moot.logs import setup_logging
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

        setup_logging("verifier", config.log_level)
        return asyncio.run(serve(config))
    except MootError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
