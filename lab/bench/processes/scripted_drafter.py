"""A real drafter process around a scripted kind: each token costs what it is told to, and is right as often as told.

python -m lab.bench.processes.scripted_drafter --token-ms 3 --acceptance 0.8 [flags of services.drafter]
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from moot.config import load_config
from moot.core.types import ModelInfo
from moot.drafters.interface import Drafter
from moot.runtime.logs import setup_logging
from moot.testing.scripted_kind import ScriptedKind
from services.drafter.config import DrafterConfig
from services.drafter.serve import serve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-ms", type=float, default=3.0)
    parser.add_argument("--acceptance", type=float, default=1.0)
    arguments, flags = parser.parse_known_args()
    config = load_config(DrafterConfig, ["--kind", "scripted", *flags])
    setup_logging("drafter", config.service.log_level)

    def make(config: DrafterConfig) -> tuple[Drafter[Any], ModelInfo]:
        drafter = ScriptedKind(token_s=arguments.token_ms / 1e3, acceptance=arguments.acceptance)
        return drafter, ModelInfo("", "", "", drafter.text.vocab_size, drafter.context_limit)

    asyncio.run(serve(config, make))


if __name__ == "__main__":
    main()
