"""This repository's whole system, asked through HTTP with drafting on and off, many requests at once by threads."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lines import Answer, serve

from moot.client import Answer as Streamed
from moot.commands.common import say
from moot.commands.system import SystemConfig, running

MOST_AT_ONCE = 64


def main(threads: int) -> None:
    with (
        running(SystemConfig(port=0, num_threads=threads), "peers", say) as system,
        ThreadPoolExecutor(MOST_AT_ONCE) as pool,
    ):
        model = system.client.models()[0]

        def ask(started: float, request: dict[str, Any], text: str) -> Answer:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": request["max_tokens"],
                "return_token_ids": True,
            }
            if request["variant"] == "off":
                body["num_speculative_tokens"] = 0
            streamed = Streamed()
            times = [time.perf_counter() for _ in system.client.stream_chat(body, streamed)]
            return {
                "token_ids": streamed.token_ids,
                # What comes with the first piece is no decoding; it is one token.
                "first_s": times[0] - started,
                "total_s": times[-1] - started,
            }

        def answer(request: dict[str, Any]) -> list[Answer]:
            system.supervisor.check()
            started = time.perf_counter()
            return list(pool.map(lambda text: ask(started, request, text), request["texts"]))

        serve(answer, versions={})


if __name__ == "__main__":
    main(int(sys.argv[2]))
