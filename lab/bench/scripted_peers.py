"""A process of scripted peers on the real wire, for measurements of the router alone: one verifier, some drafters.

    python -m bench.scripted_peers --fingerprint HEX [--drafters 3] [--step-ms 0] [--spoil 0.3] [--ready-file PATH]

A spoilt proposal is right up to a drawn place. The process ends with its parent or on SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

from moot.rpc.server import termination_event, write_ready_file
from moot.testing.drafter import ScriptedDrafter
from moot.testing.verifier import ScriptedVerifier


async def serve(arguments: argparse.Namespace) -> None:
    ended = termination_event()
    async with AsyncExitStack() as stack:
        verifier = ScriptedVerifier(tokenizer_fingerprint=arguments.fingerprint, max_num_seqs=256)
        verifier.step_s = arguments.step_ms / 1e3
        await stack.enter_async_context(verifier)
        drafters = []
        for index in range(arguments.drafters):
            drafter = ScriptedDrafter(seed=index, spoil=arguments.spoil, tokenizer_fingerprint=arguments.fingerprint)
            drafters.append(await stack.enter_async_context(drafter))
        write_ready_file(
            arguments.ready_file, verifier=verifier.address, drafters=[drafter.address for drafter in drafters]
        )
        await ended.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--drafters", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--spoil", type=float, default=0.3)
    parser.add_argument("--ready-file", type=Path)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
