"""`python -m tests.paths`: the path-equality suite over any number of cases, or one case again. See path_play.py."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.paths.path_coverage import Findings, missing
from tests.paths.path_drawing import CASES_PER_SYSTEM
from tests.paths.path_peers import House
from tests.paths.path_play import Played, describe

EVERY_S = 10.0


async def run(numbers: Sequence[int], is_alone: bool) -> Findings:
    """What came of these cases; those that are wrong are printed as they come."""
    findings = Findings()
    began = told = time.monotonic()

    def tell(played: Played) -> None:
        nonlocal told
        if played.problems:
            print(describe(played), flush=True)
        now = time.monotonic()
        if now - told >= EVERY_S:
            told, done = now, len(findings.played)
            left_s = (now - began) / done * (len(numbers) - done)
            print(f"{done} of {len(numbers)} cases, {left_s:.0f} s left", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        async with House(Path(folder)) as house:
            await findings.play(house, numbers, tell, is_alone=is_alone)
    num_wrong = sum(bool(played.problems) for played in findings.played)
    print(f"{len(findings.played)} cases in {time.monotonic() - began:.0f} s, {num_wrong} wrong")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.paths",
        description="Play drawn cases and compare each with plain decoding.",
        epilog="example: python -m tests.paths --cases 10000 --first 20000",
    )
    parser.add_argument("--cases", type=int, default=500, help="how many cases")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--case", type=int, help="play this one alone")
    parser.add_argument("--system", type=int, help="play all cases of this system, together")
    parser.add_argument("--verbose", action="store_true", help="show what the services log, and all that was counted")
    args = parser.parse_args()
    logging.getLogger("moot").setLevel(logging.INFO if args.verbose else logging.CRITICAL)
    whole = args.case is None and args.system is None
    numbers: Sequence[int] = range(args.first, args.first + args.cases)
    if args.system is not None:
        numbers = range(args.system * CASES_PER_SYSTEM, (args.system + 1) * CASES_PER_SYSTEM)
    if args.case is not None:
        numbers = [args.case]
    findings = asyncio.run(run(numbers, args.case is not None))
    if args.verbose:
        for name, number in sorted(findings.seen.items()):
            print(f"  {name}: {number}")
    seldom = missing(findings.seen) if whole and args.cases >= 500 else []
    for line in seldom:
        print(f"too seldom: {line}")
    return int(bool(findings.wrong or seldom))


if __name__ == "__main__":
    sys.exit(main())
