"""Whether the accelerator's way works and what it costs: one command, random weights, under 8 minutes on one GPU.

    python -m lab.bench.gpu_check
    python -m lab.bench.gpu_check --device cpu --small

Checks, each with its own time limit; the exit status is 1 when one fails or does not fit in:

- attention: torch's variable-length kernel against plain operations, on the same pages;
- noise: hashes equal to the CPU's bit by bit, Gumbel noise within 4 ulp (each may be off by 2), ids of the sampler
  equal to the CPU's;
- path equality: text with drafts (chains and trees, true and corrupted) against plain decoding, in natural mode with
  the gap between the two best logits at each first mismatch, which must be below --epsilon, and in batch-invariant
  mode, where texts must be equal;
- T(n): a pass of n rows of an 8B-shaped model at context 200 and 1000, beside the floor, which is the time to read the
  weights once;
- verify step: 16 requests of 5 rows each, from tokens to ids on the host.

This has been run on a CPU only, with --small; no figure of a GPU is known to the project yet.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lab.bench.gpu_check import equality, kernels, timing
from lab.bench.gpu_check.subject import Subject
from lab.bench.harness.pages import Bench, PageConfig, Table
from moot.config import option

BENCH = Bench("gpu_check", __doc__, measures=("moot/model",))
BUDGET_S = 460.0


@dataclass(frozen=True)
class Check:
    name: str
    limit_s: float
    run: Callable[[Subject], list[tuple[str, str]]]
    """Returns facts, name and value; raises AssertionError where the check fails."""


CHECKS = (
    Check("attention", 60, kernels.attention),
    Check("noise", 30, kernels.noise),
    Check("path equality, natural", 100, equality.natural),
    Check("path equality, batch-invariant", 100, equality.batch_invariant),
    Check("T(n) and floor", 120, timing.rows),
    Check("verify step, 16 x 5", 60, timing.step),
)


@dataclass(frozen=True, kw_only=True)
class Config(PageConfig):
    device: str = option("cuda", help="what is checked", choices=("cuda", "cpu"))
    small: bool = option(False, help="a tiny model in place of the 8B-shaped one")
    epsilon: float = option(0.1, help="largest gap of logits at which texts may part")
    no_graphs: bool = option(False, help="compute every step without a recorded graph")
    plain_attention: bool = option(False, help="plain operations in place of torch's kernel")


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    if config.device == "cuda" and not torch.cuda.is_available():
        sys.exit("gpu_check: torch finds no GPU (use --device cpu --small to try the script itself)")
    # A device that hangs cannot be asked to stop: then the process ends with where it stood.
    faulthandler.dump_traceback_later(BUDGET_S + 15, exit=True)
    subject = Subject(
        torch.device(config.device),
        config.small,
        config.epsilon,
        use_graphs=not config.no_graphs,
        use_kernel=False if config.plain_attention else None,
    )
    rows: list[tuple[str, str, str, str]] = []
    failed = False
    begin = time.monotonic()
    for check in CHECKS:
        left_s = BUDGET_S - (time.monotonic() - begin)
        if left_s < min(check.limit_s, 20):
            failed = True
            rows.append((check.name, "FAILED", "", "no time left"))
            continue
        print(f"{check.name} (at most {min(check.limit_s, left_s):.0f} s)", flush=True)
        start = time.monotonic()
        subject.deadline = start + min(check.limit_s, left_s)
        try:
            facts, verdict = check.run(subject), "ok"
        except Exception as error:  # noqa: BLE001 - one check's failure is its result; the others are still wanted
            facts, verdict, failed = [("error", f"{type(error).__name__}: {error}"[:300])], "FAILED", True
        taken = f"{time.monotonic() - start:.1f} s"
        print(f"  {verdict} after {taken}", flush=True)
        rows += [(check.name, verdict, taken, f"{name}: {value}") for name, value in facts]
        subject.let_go()
    BENCH.publish(config, Table(("check", "result", "time", "found"), rows), {"failed": failed}, argv=argv)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
