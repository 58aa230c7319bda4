"""When drafter and verifier compute, one row per process, for one request and for eight.

    python -m bench.timeline [--model PATH] [--draft-layers 4] [--requests 1,8]

A real router, verifier and neural drafter (the target's first layers, without training: its proposals are poor, its
cost is a small model's), one thread each, drafting ahead on and off in turns. Reported: the share of the verifier's
computing during which the drafter computes too.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.harness.arms import Arm, Column, Runs, in_turns
from bench.harness.pages import Bench, BenchConfig, Table
from bench.harness.scripted import MODEL, module, start_router
from moot.config import option
from moot.folders import cache_dir
from moot.supervisor import Child, Supervisor

BENCH = Bench("timeline", __doc__, measures=("services/drafter", "services/verifier", "moot/proposers/neural.py"))
START_TIMEOUT_S = 90.0
Spans = list[tuple[int, int]]
SHOWN_NS = 1_000_000_000
HEADER = ("requests", "draft ahead", "share of verifier time with the drafter at work")


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    model: Path = option(cache_dir() / "smollm2-135m-instruct", help="folder of the target")
    draft_layers: int = option(4, help="layers of the target that are the draft model")
    requests: tuple[int, ...] = option((1, 8), help="requests at once")
    tokens: int = option(16, help="tokens of each answer")
    length: int = option(4, help="K")


def make_draft(model: Path, folder: Path, layers: int) -> Path:
    import torch
    import transformers

    draft = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, num_hidden_layers=layers)
    draft.save_pretrained(folder)
    for path in model.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def start(supervisor: Supervisor, folder: Path, config: Config) -> Child:
    draft = make_draft(config.model, folder / "draft", config.draft_layers)
    environ = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own = ("--port", "0", "--metrics-port", "0")
    verifier = supervisor.spawn(
        "verifier",
        module("traced_verifier", ["--model", str(config.model), "--num-threads", "1", *own]),
        environ=environ | {"MOOT_TRACE_FILE": str(folder / "verifier.trace")},
    )
    drafters = [
        supervisor.service(
            mode,
            "drafter",
            ["--kind", "neural", "--model", str(draft), "--num-threads", "1", "--draft-ahead", mode, *own],
            environ=environ | {"MOOT_TRACE_FILE": str(folder / f"{mode}.trace")},
        )
        for mode in ("on", "off")
    ]
    supervisor.wait_ready([verifier, *drafters], START_TIMEOUT_S)
    named = ",".join(f"{child.name}=127.0.0.1:{child.port}" for child in drafters)
    flags = ["--model", str(config.model), "--redis-url", "none"]
    flags += ["--vote-soft-deadline-ms", "500", "--vote-hard-deadline-ms", "1000"]
    return start_router(supervisor, f"127.0.0.1:{verifier.port}", named, flags)


async def load(router: Child, drafter: str, requests: int, tokens: int, length: int) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{router.port}", timeout=120) as client:

        async def one(index: int) -> None:
            body = {"model": MODEL, "prompt": f"{index} A list of all the towns", "max_tokens": tokens}
            body |= {"temperature": 0, "ignore_eos": True, "num_speculative_tokens": length, "drafters": [drafter]}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        await asyncio.gather(*(one(index) for index in range(requests)))


def spans(path: Path, start_ns: int, end_ns: int) -> Spans:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        (line["start_ns"], line["end_ns"])
        for line in lines
        if start_ns <= line["start_ns"] and line["end_ns"] <= end_ns
    ]


def overlap_share(verify: Spans, draft: Spans) -> float:
    """The part of `verify` that lies within `draft`, 0 to 1. The spans of each do not overlap one another."""
    common = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in verify for b in draft)
    return common / sum(end - begin for begin, end in verify)


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    arms = [
        Arm(f"{requests}/{mode}", {"requests": requests, "mode": mode})
        for requests in config.requests
        for mode in ("on", "off")
    ]
    shown: dict[str, tuple[Spans, Spans]] = {}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        folder = Path(name)
        router = start(supervisor, folder, config)

        def take(arm: Arm) -> dict[str, float]:
            begin = time.monotonic_ns()
            asyncio.run(load(router, arm.differs["mode"], arm.differs["requests"], config.tokens, config.length))
            end = time.monotonic_ns()
            verify, draft = (spans(folder / f"{one}.trace", begin, end) for one in ("verifier", arm.differs["mode"]))
            shown[arm.name] = verify, draft
            return {"share": overlap_share(verify, draft)}

        runs = Runs(in_turns(arms, take, config.repetitions))
    share = Column("", "share")
    rows = [(arm.differs["requests"], arm.differs["mode"], share.cell(runs, arm.name)) for arm in arms]

    def draw(figure: Any) -> None:
        panels = figure.subplots(len(shown), 1)
        for axes, arm in zip(panels, arms, strict=True):
            verify, draft = shown[arm.name]
            middle = verify[len(verify) // 3][0]
            for row, (found, color) in enumerate(((draft, "tab:orange"), (verify, "tab:blue"))):
                bars = [((a - middle) / 1e6, (b - a) / 1e6) for a, b in found if middle <= a <= middle + SHOWN_NS]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=color)
            axes.set_yticks([0, 1], ["drafter", "verifier"])
            axes.set_xlim(0, SHOWN_NS / 1e6)
            axes.set_title(f"{arm.differs['requests']} request(s), draft ahead {arm.differs['mode']}", fontsize=9)
        panels[-1].set_xlabel("ms")

    BENCH.publish(config, Table(HEADER, rows, labels=2), {"runs": runs.of}, HEADER[2], draw=draw, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
