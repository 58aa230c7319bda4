"""`python -m services.router --model PATH --verifiers HOST:PORT`: the API, the rounds and the vote."""

from __future__ import annotations

import asyncio
import sys

from moot.config import load_config
from moot.core.errors import MootError
from moot.runtime.logs import setup_logging
from moot.tokenizer import keep_torch_out
from services.router.config import RouterConfig
from services.router.lifecycle import serve
from services.router.workers import serve_workers


def main() -> int:
    try:
        config = load_config(
            RouterConfig,
            sys.argv[1:],
            prog="python -m services.router",
            description="Serve the API: ask the drafters, hold the vote, let the verifier decide.",
            example="python -m services.router --model ./model --verifiers 127.0.0.1:7100 "
            "--drafters neural=127.0.0.1:7200 --in-process-drafters suffix,prompt_lookup",
        )
        setup_logging("router", config.service.log_level)
        if config.workers > 1:
            serve_workers(config, sys.argv[1:])
            return 0
        keep_torch_out()
        asyncio.run(serve(config))
    except MootError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
