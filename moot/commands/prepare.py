"""`moot prepare MODEL`: fetch, convert and check a model once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from moot.commands.common import say


def run(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="moot prepare",
        description="Make a model ready to be loaded quickly, and print its folder.",
        epilog="example:\n  moot prepare smollm2-135m-instruct",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2-135m-instruct (the demo's model), a local folder, or a hub id"
    )
    parser.add_argument("--cache", type=Path, help="where prepared models lie (default: MOOT_CACHE or ~/.cache/moot)")
    arguments = parser.parse_args(argv)
    # Imports torch: not before the flags are known to be right.
    from moot.model.loading.prepare import prepare

    print(prepare(arguments.model, arguments.cache, say))
    return 0
