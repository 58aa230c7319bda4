"""When drafter and verifier compute, one row per process, for one request and for eight.

    python -m bench.timeline [--model ~/.cache/moot/smollm2-135m-instruct] [--draft-layers 4] [--requests 1 8]

A real router, verifier and neural drafter (the target's first layers, without training: its proposals are poor, its
cost is a small model's), one thread each, drafting ahead on and off in turns. Reported: the share of the verifier's
computing during which the drafter computes too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from lab.bench.driving.routers import MODEL, start_router
from lab.bench.intervals import Interval
from lab.bench.report import publish
from moot.runtime.supervisor import Child, Supervisor

START_TIMEOUT_S = 90.0
Spans = list[tuple[int, int]]
SHOWN_NS = 1_000_000_000


def make_draft(model: Path, folder: Path, layers: int) -> Path:
    import torch
    import transformers

    draft = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, num_hidden_layers=layers)
    draft.save_pretrained(folder)
    for path in model.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def start(supervisor: Supervisor, folder: Path, arguments: argparse.Namespace) -> Child:
    draft = make_draft(arguments.model, folder / "draft", arguments.draft_layers)
    environ = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    own = ("--port", "0", "--metrics-port", "0")
    command = [sys.executable, "-m", "bench.traced_verifier", "--model", str(arguments.model), "--num-threads", "1"]
    verifier = supervisor.spawn(
        "verifier",
        [*command, *own, "--ready-file", "{ready_file}"],
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
    flags = ["--model", str(arguments.model), "--redis-url", "none"]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path.home() / ".cache/moot/smollm2-135m-instruct")
    parser.add_argument("--draft-layers", type=int, default=4)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--length", type=int, default=4, help="K")
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    shares: dict[tuple[int, str], list[float]] = {}
    shown: dict[tuple[int, str], tuple[Spans, Spans]] = {}
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(Path(name)) as supervisor:
        folder = Path(name)
        router = start(supervisor, folder, arguments)
        for repetition in range(arguments.repetitions + 1):
            for requests in arguments.requests:
                for mode in ("on", "off"):
                    begin = time.monotonic_ns()
                    asyncio.run(load(router, mode, requests, arguments.tokens, arguments.length))
                    end = time.monotonic_ns()
                    verify, draft = (spans(folder / f"{one}.trace", begin, end) for one in ("verifier", mode))
                    if repetition:
                        shares.setdefault((requests, mode), []).append(overlap_share(verify, draft))
                    shown[requests, mode] = (verify, draft)
            print(f"round {repetition} of {arguments.repetitions}", flush=True)
    rows = [(requests, mode, Interval.of(found).text()) for (requests, mode), found in shares.items()]

    def draw(figure: Any) -> None:
        figures = figure.subplots(len(shown), 1)
        for axes, ((requests, mode), (verify, draft)) in zip(figures, shown.items(), strict=True):
            middle = verify[len(verify) // 3][0]
            for row, (found, color) in enumerate(((draft, "tab:orange"), (verify, "tab:blue"))):
                bars = [((a - middle) / 1e6, (b - a) / 1e6) for a, b in found if middle <= a <= middle + SHOWN_NS]
                axes.broken_barh(bars, (row - 0.4, 0.8), color=color)
            axes.set_yticks([0, 1], ["drafter", "verifier"])
            axes.set_xlim(0, SHOWN_NS / 1e6)
            axes.set_title(f"{requests} request(s), draft ahead {mode}", fontsize=9)
        figures[-1].set_xlabel("ms")

    publish(
        "timeline",
        ("requests", "draft ahead", "share of verifier time with the drafter at work"),
        rows,
        {"shares": {f"{requests}/{mode}": found for (requests, mode), found in shares.items()}},
        draw,
    )


if __name__ == "__main__":
    main()
