"""A round's time with drafting ahead and without: does drafting hide behind verifying?

    python -m bench.overlap [--lengths 4 8 12] [--acceptance 1.0 0.8 0.5] [--rounds 15] [--repetitions 7]

A real router and real drafter processes (a scripted kind: --token-ms a token, right with the chance of the column) in
front of a scripted verifier (--verify-ms a step), every way delayed by --network-ms. Draft = K tokens and two ways,
verify = one step and two ways. Hidden whole, a round takes the longer of the two, else their sum. Acceptances below 1
are measured at the middle K. A round's time: a request less its opening, over its rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lab.bench.driving.routers import MODEL, START_TIMEOUT_S, start_router
from lab.bench.intervals import Interval, interleaved
from lab.bench.report import publish
from moot.runtime.supervisor import Child, Supervisor
from moot.testing.tokenizer import byte_tokenizer
from moot.tokenizer import tokenizer_fingerprint

MODES = ("on", "off")


def start(supervisor: Supervisor, folder: Path, arguments: argparse.Namespace) -> Child:
    """The router, ready; its drafters are named by mode and acceptance, as on-0.8."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    names = [f"{mode}-{rate:g}" for rate in arguments.acceptance for mode in MODES]
    drafters = []
    for name in names:
        mode, _, rate = name.partition("-")
        flags = ["--token-ms", str(arguments.token_ms), "--acceptance", rate, "--draft-ahead", mode, "--port", "0"]
        command = [sys.executable, "-m", "bench.scripted_drafter", *flags, "--metrics-port", "0"]
        drafters.append(supervisor.spawn(name, [*command, "--ready-file", "{ready_file}"]))
    supervisor.wait_ready(drafters, START_TIMEOUT_S)
    flags = ["--fingerprint", tokenizer_fingerprint(tokenizer), "--verify-ms", str(arguments.verify_ms)]
    flags += ["--network-ms", str(arguments.network_ms)]
    flags += ["--drafters", ",".join(f"127.0.0.1:{child.port}" for child in drafters)]
    peers = supervisor.spawn(
        "peers", [sys.executable, "-m", "bench.overlap_peers", *flags, "--ready-file", "{ready_file}"]
    )
    supervisor.wait_ready([peers], START_TIMEOUT_S)
    named = ",".join(f"{name}={address}" for name, address in zip(names, peers.facts["drafters"], strict=True))
    flags = ["--model", str(folder / "tokenizer"), "--redis-url", "none", "--vote-soft-deadline-ms", "200"]
    flags += ["--num-speculative-tokens", "32", "--max-draft-tokens", "32"]
    return start_router(supervisor, peers.facts["verifier"], named, flags)


def round_ms(router: Child, drafter: str, length: int, max_tokens: int) -> float:
    """A request less one that ends with its first token, over the rounds between. Not from chunk to chunk: text that
    ends within a character is held back, and a round with it."""
    opening, _ = timed(router, drafter, length, 1)
    whole, num_rounds = timed(router, drafter, length, max_tokens)
    return 1e3 * (whole - opening) / num_rounds


def timed(router: Child, drafter: str, length: int, max_tokens: int) -> tuple[float, int]:
    """Seconds and rounds of one request."""
    body = {
        "model": MODEL,
        "prompt": f"what is asked {time.monotonic_ns()}",
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "num_speculative_tokens": length,
        "drafters": [drafter],
        "include_metrics": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{router.port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return time.perf_counter() - start, int(answer["metrics"]["speculative_decoding"]["num_drafts"])


def cases(arguments: argparse.Namespace) -> list[tuple[int, float]]:
    """(K, acceptance) of each line."""
    middle = sorted(arguments.lengths)[len(arguments.lengths) // 2]
    best = max(arguments.acceptance)
    return [(k, best) for k in arguments.lengths] + [(middle, rate) for rate in arguments.acceptance if rate != best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 8, 12])
    parser.add_argument("--acceptance", type=float, nargs="+", default=[1.0, 0.8, 0.5])
    parser.add_argument("--verify-ms", type=float, default=30.0)
    parser.add_argument("--token-ms", type=float, default=3.0)
    parser.add_argument("--network-ms", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    measurements: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        router = start(supervisor, Path(name), arguments)
        for length, rate in cases(arguments):
            accepted = sum(rate**depth for depth in range(1, length + 1))
            max_tokens = round(arguments.rounds * (1 + accepted))
            for mode in MODES:
                call = partial(round_ms, router, f"{mode}-{rate:g}", length, max_tokens)
                measurements[f"{length}/{rate:g}/{mode}"] = call
        found = interleaved(measurements, arguments.repetitions)
    report(arguments, found)


def report(arguments: argparse.Namespace, found: dict[str, list[float]]) -> None:
    rows, bars = [], []
    verify = arguments.verify_ms + 2 * arguments.network_ms
    for length, rate in cases(arguments):
        draft = length * arguments.token_ms + 2 * arguments.network_ms
        longer, both = max(draft, verify), draft + verify
        for mode in MODES:
            times = found[f"{length}/{rate:g}/{mode}"]
            to_longer = Interval.of([each / longer for each in times])
            to_sum = Interval.of([each / both for each in times])
            bound = to_longer.verdict(at_most=1.15) if mode == "on" and rate == 1 else "none"
            rows.append(
                (length, f"{rate:.0%}", mode, Interval.of(times).text(1), to_longer.text(), to_sum.text(), bound)
            )
            bars.append((f"K {length}, {rate:.0%}\n{mode}", Interval.of(times), longer, both))

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, (_, taken, longer, both) in enumerate(bars):
            error = [[taken.median - taken.low], [taken.high - taken.median]]
            axes.bar(index, taken.median, yerr=error, color="tab:blue" if index % 2 == 0 else "tab:gray", capsize=3)
            axes.hlines(longer, index - 0.45, index + 0.45, color="tab:green", label="longer" if not index else None)
            axes.hlines(both, index - 0.45, index + 0.45, color="tab:red", label="sum" if not index else None)
        axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=8)
        axes.set_ylabel("round, ms")
        axes.set_title("A round with drafting ahead on and off; K and acceptance of each token")
        axes.legend(loc="upper left")

    publish(
        "overlap",
        ("K", "acceptance", "draft ahead", "round ms", "of the longer", "of the sum", "bound 1.15"),
        rows,
        {"round_ms": found, "options": {key: value for key, value in vars(arguments).items()}},
        draw,
    )


if __name__ == "__main__":
    main()
