"""The running systems that files of tests share (conftest.py starts them): what each consists of, and their flags."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from tests.integration.processes import Process
from tests.integration.whole_system import System
from tests.waiting import GIVE_UP_S

NARROW_BYTES = 16 * 1024
IN_PROCESS = ("--in-process-drafters", "prompt_lookup,suffix")
PATIENT = (
    *("--vote-soft-deadline-ms", "30000", "--vote-hard-deadline-ms", "30000", "--drafter-warm-up-s", "60"),
    *("--heartbeat-interval-s", "2"),
)
"""A round waits for every drafter, on a busy machine as well: what these tests look for depends on no speed."""
EVERYBODY = (*PATIENT, "--asks", "all")
"""Beside a tiny target the draft model is hardly worth its time: who wants many tokens accepted asks it anyway."""
FIXED = ("--length", "fixed", *EVERYBODY)
"""And drafts are made in every round, whatever they cost."""
DEADLINES = (
    "--vote-soft-deadline-ms",
    "1000",
    "--vote-hard-deadline-ms",
    "1000",
    "--drafter-warm-up-s",
    "0.5",
    "--eject-s",
    "0.5",
)

HOSTILE_DRAFTERS = {
    "good": "",
    "liar": "lie",
    "second_liar": "lie",
    "third_liar": "lie",
    "garbage": "garbage",
    "late": "delay:3",
}
"""Drafter id to its fault. All liars propose the same wrong tokens. `late` answers long after the hard deadline."""

VOTES = {
    "calibrated": ("--shape", "tree", "--weights", "hedge", "--length", "fixed"),
    "majority": ("--shape", "chain", "--weights", "minions", "--length", "minions"),
    "accumulated": ("--shape", "siblings", "--weights", "uniform", "--length", "fixed"),
    "best": ("--shape", "chain", "--weights", "hedge", "--length", "goodput"),
}
"""Vote policy to the other policies beside it: every policy of every kind is there once at least."""


@dataclass(frozen=True, slots=True)
class Looping:
    """The target with known cycles behind two routers: votes on trees, and Minions' majority vote on chains."""

    system: System
    tree: Process
    chain: Process

    @property
    def routers(self) -> tuple[Process, Process]:
        return self.tree, self.chain


@dataclass(frozen=True, slots=True)
class Voting:
    """A random llama with a suffix and a neural drafter, behind one router per vote policy."""

    system: System
    routers: dict[str, Process]


@dataclass(frozen=True, slots=True)
class Scripted:
    """A real router process before a scripted verifier and a scripted drafter, which run on a thread of this process.

    `text` is what every request must get."""

    router: Process
    verifier: ScriptedVerifier
    drafter: ScriptedDrafter
    text: ScriptedText


class LoopThread:
    """An event loop on a thread of its own, so that synchronous tests can run servers."""

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(GIVE_UP_S)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(GIVE_UP_S)


def make_alike(model: Path, path: Path, noise: float = 0.01) -> Path:
    """A draft model that mostly agrees with `model`: its weights with some noise, drawn from a fixed seed."""
    draft = AutoModelForCausalLM.from_pretrained(model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(noise * torch.randn(weight.shape, generator=draw))
    draft.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((model / name).read_bytes())
    return path
