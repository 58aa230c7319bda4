"""`python -m services.drafter --kind suffix --tokenizer PATH`: one drafter as a process."""

from __future__ import annotations

import asyncio
import sys

from moot.config import load_config
from moot.core.errors import ConfigError, ModelRefused
from moot.drafters.registry import MODEL_FREE_KINDS
from moot.runtime.logs import setup_logging
from moot.tokenizer import keep_torch_out
from services.drafter.config import DrafterConfig
from services.drafter.serve import serve


def main() -> int:
    try:
        config = load_config(
            DrafterConfig,
            sys.argv[1:],
            prog="python -m services.drafter",
            description="One drafter: proposes the next tokens of texts to routers.",
            example="python -m services.drafter --kind suffix --tokenizer models/target --port 7200",
        )
        setup_logging("drafter", config.service.log_level)
        if config.kind in MODEL_FREE_KINDS:
            keep_torch_out()
        asyncio.run(serve(config))
    except (ConfigError, ModelRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
