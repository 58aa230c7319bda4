"""This repository's whole system, asked through HTTP with drafting on and off, many requests at once by threads."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lab.bench.peers.children.lines import StreamedAnswer, serve
from moot.client import StreamedAnswer as Streamed
from moot.commands.common import say
from moot.commands.system import SystemConfig, running

MOST_AT_ONCE = 64
CHECK_TIMEOUT_S = 60.0
CHECKED_TOKENS = 8


def main(threads: int) -> None:
    with (
        running(SystemConfig(port=0, num_threads=threads), "peers", say) as system,
        ThreadPoolExecutor(MOST_AT_ONCE) as pool,
    ):
        model = system.client.models()[0]

        def ask(started: float, request: dict[str, Any], text: str) -> StreamedAnswer:
            body = {
                "model": model,
                "messages": [{"role": "user", "content": text}],
                "temperature": 0,
                "max_tokens": request["max_tokens"],
                "return_token_ids": True,
                # No prompt kept from another request is shared: the others compute each anew too.
                "cache_salt": uuid.uuid4().hex,
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

        same: set[tuple[int, ...]] = set()

        def post(path: str, body: dict[str, Any]) -> Any:
            shared = {"model": model, "temperature": 0, "return_token_ids": True}
            request = urllib.request.Request(
                system.url + path, json.dumps(body | shared).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=CHECK_TIMEOUT_S) as response:
                return json.load(response)

        def check(text: str, prompt: list[int]) -> None:
            """The others get the ids, this server the text. Raises ValueError where they differ."""
            if tuple(prompt) in same:
                return
            messages = [{"role": "user", "content": text}]
            by_text = post("/v1/chat/completions", {"messages": messages, "max_tokens": CHECKED_TOKENS})
            by_ids = post("/v1/completions", {"prompt": prompt, "max_tokens": CHECKED_TOKENS})
            counts = [told["usage"]["prompt_tokens"] for told in (by_text, by_ids)]
            ids = [told["choices"][0]["token_ids"] for told in (by_text, by_ids)]
            if counts != [len(prompt)] * 2 or ids[0] != ids[1]:
                raise ValueError(f"the server's prompt is not the one that the others get: {counts}, {ids}")
            same.add(tuple(prompt))

        def answer(request: dict[str, Any]) -> list[StreamedAnswer]:
            system.supervisor.check()
            for text, prompt in zip(request["texts"], request["prompts"], strict=True):
                check(text, prompt)
            started = time.perf_counter()
            return list(pool.map(lambda text: ask(started, request, text), request["texts"]))

        serve(answer, versions={})


if __name__ == "__main__":
    main(int(sys.argv[2]))
