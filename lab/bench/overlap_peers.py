"""A process with one scripted verifier, and a delay on the way to it and to each drafter given.

    python -m bench.overlap_peers --fingerprint HEX --verify-ms 30 --network-ms 1 --drafters HOST:PORT,HOST:PORT

The ready file names where the verifier and the drafters are reached through the delay.
"""

from __future__ import annotations

import argparse
import asyncio
import selectors
from pathlib import Path

from lab.bench.delay_line import DelayLine
from moot.rpc.server import termination_event, write_ready_file
from moot.testing.verifier import ScriptedVerifier


async def serve(arguments: argparse.Namespace) -> None:
    ended, delay_s = termination_event(), arguments.network_ms / 1e3
    verifier = ScriptedVerifier(tokenizer_fingerprint=arguments.fingerprint, max_num_seqs=256)
    verifier.step_s = arguments.verify_ms / 1e3
    async with verifier:
        far = DelayLine(verifier.address, delay_s)
        drafters = [DelayLine(address, delay_s) for address in arguments.drafters.split(",")]
        write_ready_file(arguments.ready_file, verifier=far.address, drafters=[line.address for line in drafters])
        await ended.wait()
        for line in (far, *drafters):
            line.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--verify-ms", type=float, default=30.0)
    parser.add_argument("--network-ms", type=float, default=1.0)
    parser.add_argument("--drafters", required=True)
    parser.add_argument("--ready-file", type=Path)
    # epoll's time-outs are whole milliseconds, rounded up: a step of 30 would take 31. Those of select are not.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
