"""Time of a draft by the recurrent heads, per number of ids that they may guess, and of a search of the datastore.

    python -m bench.heads_time --model PATH --recording DIR [--rows 2048 4096 0] [--requests 1 4 16] [--rounds 25]

Every draft follows a verify pass of nine rows, which has streamed the target's weights through the caches, as it does
in service; the pass itself is not part of the time. All drafts take turns. Texts and states are those of a recording of
`moot replay`, which the target reads once more. The datastore is opened anew and asked once after every place of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.bench.intervals import Interval, interleaved
from lab.bench.report import publish
from lab.bench.verify_time import runner_pass, timed
from lab.replay.attached import read
from lab.replay.folder import TEXTS
from lab.replay.texts import TargetText, load_texts
from moot.core.history import History
from moot.core.types import SamplingParams
from moot.drafters.attached.base import InsideAsk
from moot.drafters.attached.kinds import create_all_inside
from moot.drafters.lookup.datastore import Datastore
from moot.model.backend import plain_runner
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner
from moot.shipped import locate

HEADS, DATASTORE = "shipped@heads-smollm2-135m", "shipped@suffix-smollm2-135m"
ASKED_TEXTS = 6
VERIFIED_ROWS = 9
KINDS = (("greedy", SamplingParams(temperature=0.0)), ("temperature 0.7", SamplingParams(temperature=0.7, seed=1)))


def asks_of(runner: ModelRunner, texts: Sequence[TargetText], num_tokens: int, params: SamplingParams) -> list[Any]:
    """One after every place of the texts, the texts in turns."""
    found: list[list[InsideAsk]] = []
    for text in texts:
        ids, first = [*text.prompt_token_ids, *text.output_token_ids], len(text.prompt_token_ids)
        cache = runner.new_cache()
        with torch.inference_mode():
            states = read(runner, cache, ids[:-1], first - 1).clone()
        cache.free()
        found.append([])
        for place in range(text.num_places):
            known = ids[: first + place + 1]
            found[-1].append(InsideAsk(known, params, History(known[:first], known[first:]), states[place], num_tokens))
    return [one for places in zip(*found, strict=False) for one in places]


def drafts(arguments: argparse.Namespace, texts: Sequence[TargetText]) -> dict[str, Callable[[], float]]:
    """Milliseconds of one draft, by what is drafted."""
    loaded = load_model(arguments.model, device="cpu", dtype="bfloat16", num_threads=arguments.threads)
    runner = plain_runner(loaded, 8192, False)
    verify = runner_pass(runner, 200, VERIFIED_ROWS)
    measurements: dict[str, Callable[[], float]] = {f"a verify pass of {VERIFIED_ROWS} rows": partial(timed, verify)}
    asks = {
        (kind, tokens): asks_of(runner, texts, tokens, params)
        for kind, params in KINDS
        for tokens in ((1, 4) if params.is_greedy else (4,))
    }
    for rows in arguments.rows:
        (drafter,) = create_all_inside([f"heads:path={HEADS}:rows={rows}"], "--rows", runner)
        for (kind, tokens), known in asks.items():
            for requests in arguments.requests:

                def once(drafter: Any = drafter, known: Any = known, requests: int = requests) -> float:
                    verify()
                    taken = [known.pop(0) for _ in range(requests)]
                    known.extend(taken)
                    return timed(lambda: drafter.propose(taken))

                name = f"{rows or 'all'} ids, {kind}, {tokens} token{'s' * (tokens > 1)}, {requests} requests"
                measurements[name.replace(" 1 requests", " 1 request")] = once
    return measurements


def searches_us(texts: Sequence[TargetText], num_tokens: int) -> list[float]:
    """Microseconds of a search of a datastore that was just opened, the mean of each text."""
    store = Datastore(locate(DATASTORE))
    found: list[float] = []
    for text in texts:
        ids, first = [*text.prompt_token_ids, *text.output_token_ids], len(text.prompt_token_ids)
        total = 0.0
        for place in range(text.num_places):
            known = ids[: first + place + 1]
            begin = time.perf_counter()
            store.continuation(known, num_tokens)
            total += time.perf_counter() - begin
        if text.num_places:
            found.append(1e6 * total / text.num_places)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--recording", type=Path, required=True, help="folder of `moot replay record`")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = load_texts(arguments.recording / TEXTS)
    searches = searches_us(texts, 8)
    times = interleaved(drafts(arguments, texts[:: max(1, len(texts) // ASKED_TEXTS)]), arguments.rounds, warm_up=3)
    rows = [(name, f"{Interval.of(values).text()} ms") for name, values in times.items()]
    rows.append((f"datastore, 8 tokens, mean of each of {len(searches)} texts", f"{Interval.of(searches).text(1)} us"))
    publish(
        "heads_time",
        ("draft", "median (95 %)"),
        rows,
        {"threads": arguments.threads, "times_ms": times, "datastore_us": searches},
    )


if __name__ == "__main__":
    main()
