"""A round's time with drafting ahead and without: does drafting hide behind verifying?

    python -m lab.bench.overlap [--lengths 4,8,12] [--acceptance 1.0,0.8,0.5] [--rounds 15] [--repetitions 7]

A real router and real drafter processes (a scripted kind: --token-ms a token, right with the chance of the column) in
front of a scripted verifier (--verify-ms a step), every way delayed by --network-ms. Draft = K tokens and two ways,
verify = one step and two ways. Hidden whole, a round takes the longer of the two, else their sum. Acceptances below 1
are measured at the middle K. A round's time: a request less its opening, over its rounds.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.bench.harness.arms import Arm, Runs, in_turns
from lab.bench.harness.intervals import Interval
from lab.bench.harness.pages import Bench, BenchConfig, Table
from lab.bench.harness.scripted import MODEL, START_TIMEOUT_S, module, scripted_peers, start_router
from moot.config import option
from moot.runtime.supervisor import Child, Supervisor

BENCH = Bench("overlap", __doc__, measures=("services/router", "services/drafter", "moot/rpc"))
MODES = ("on", "off")
BOUND = 1.15
HEADER = ("K", "acceptance", "draft ahead", "round ms", "of the longer", "of the sum", f"bound {BOUND}")


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    lengths: tuple[int, ...] = option((4, 8, 12), help="values of K")
    acceptance: tuple[float, ...] = option((1.0, 0.8, 0.5), help="chances that a draft token is right")
    verify_ms: float = option(30.0, help="milliseconds of a verify step")
    token_ms: float = option(3.0, help="milliseconds of a drafted token")
    network_ms: float = option(1.0, help="milliseconds of one way")
    rounds: int = option(15, help="rounds of a request")

    @property
    def arms(self) -> list[Arm]:
        """Every K at the best acceptance, and the middle K at the others, with drafting ahead and without."""
        middle, best = sorted(self.lengths)[len(self.lengths) // 2], max(self.acceptance)
        cases = [(k, best) for k in self.lengths] + [(middle, rate) for rate in self.acceptance if rate != best]
        return [
            Arm(f"{k}/{rate:g}/{mode}", {"k": k, "rate": rate, "mode": mode}) for k, rate in cases for mode in MODES
        ]


def start(supervisor: Supervisor, folder: Path, config: Config) -> Child:
    """The router, ready; its drafters are named by mode and acceptance, as on-0.8."""
    drafters: dict[str, Child] = {}
    for rate in config.acceptance:
        for mode in MODES:
            flags = ["--token-ms", str(config.token_ms), "--acceptance", f"{rate:g}", "--draft-ahead", mode]
            name = f"{mode}-{rate:g}"
            command = module("scripted_drafter", [*flags, "--port", "0", "--metrics-port", "0"])
            drafters[name] = supervisor.spawn(name, command)
    supervisor.wait_ready(list(drafters.values()), START_TIMEOUT_S)
    far = ",".join(f"127.0.0.1:{child.port}" for child in drafters.values())
    flags = ["--step-ms", str(config.verify_ms), "--network-ms", str(config.network_ms), "--drafters", "0"]
    peers = scripted_peers(supervisor, folder, [*flags, "--far", far])
    supervisor.wait_ready([peers], START_TIMEOUT_S)
    named = ",".join(f"{name}={address}" for name, address in zip(drafters, peers.facts["drafters"], strict=True))
    flags = ["--model", str(folder / "tokenizer"), "--redis-url", "none", "--vote-soft-deadline-ms", "200"]
    flags += ["--num-speculative-tokens", "32", "--max-draft-tokens", "32"]
    return start_router(supervisor, peers.facts["verifier"], named, flags)


def round_ms(router: Child, arm: Arm, rounds: int) -> float:
    """A request less one that ends with its first token, over the rounds between. Not from chunk to chunk: text that
    ends within a character is held back, and a round with it."""
    k, rate = arm.differs["k"], arm.differs["rate"]
    drafter = f"{arm.differs['mode']}-{rate:g}"
    max_tokens = round(rounds * (1 + sum(rate**depth for depth in range(1, k + 1))))
    opening, _ = timed(router, drafter, k, 1)
    whole, num_rounds = timed(router, drafter, k, max_tokens)
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
    url = f"http://127.0.0.1:{router.port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    return time.perf_counter() - begin, int(answer["metrics"]["speculative_decoding"]["num_drafts"])


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        router = start(supervisor, Path(name), config)
        runs = Runs(in_turns(config.arms, lambda arm: {"ms": round_ms(router, arm, config.rounds)}, config.repetitions))
    report(config, runs, argv)
    return 0


def report(config: Config, runs: Runs, argv: Sequence[str] | None) -> None:
    rows = []
    verify = config.verify_ms + 2 * config.network_ms
    for arm in config.arms:
        k, rate, mode = arm.differs["k"], arm.differs["rate"], arm.differs["mode"]
        draft = k * config.token_ms + 2 * config.network_ms
        longer, both = max(draft, verify), draft + verify
        taken = runs.interval(arm.name, "ms")
        to_longer, to_sum = (Interval.of([ms / part for ms in runs.values(arm.name, "ms")]) for part in (longer, both))
        bound = to_longer.verdict(at_most=BOUND) if mode == "on" and rate == 1 else "none"
        rows.append((k, f"{rate:.0%}", mode, f"{taken.median:.1f}", to_longer.text(), f"{to_sum.median:.2f}", bound))
    BENCH.publish(config, Table(HEADER, rows, labels=3), {"runs": runs.of}, "of the longer", argv=argv)


if __name__ == "__main__":
    sys.exit(main())
