"""Running systems that files of tests share: real processes, started only when first used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from looping_model import make_looping_model
from processes import SETTLE_S, Process, eventually
from transformers import AutoModelForCausalLM
from whole_system import System, running

from moot.model.tiny import byte_tokenizer, make_tiny_model
from moot.supervisor import Supervisor
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint

NARROW_BYTES = 16 * 1024
IN_PROCESS = ("--in-process-drafters", "prompt_lookup,suffix")
PATIENT = (
    *("--vote-soft-deadline-ms", "5000", "--vote-hard-deadline-ms", "5000", "--drafter-warm-up-s", "10"),
    *("--heartbeat-interval-s", "2"),
)
"""A round waits for every drafter, on a busy machine as well: what these tests look for depends on no speed."""
FIXED = ("--length", "fixed", *PATIENT)
"""And drafts are made in every round, whatever they cost."""


@pytest.fixture(scope="session")
def systems_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("systems")


@dataclass(frozen=True, slots=True)
class Looping:
    """The target with known cycles behind two routers: votes on trees, and Minions' majority vote on chains."""

    system: System
    tree: Process
    chain: Process

    @property
    def routers(self) -> tuple[Process, Process]:
        return self.tree, self.chain


@pytest.fixture(scope="session")
def looping(systems_folder: Path) -> Iterator[Looping]:
    """Drafters suffix and prompt_lookup as processes, records in a store, a context of 40960 tokens."""
    model = make_looping_model(systems_folder / "looping", context=40_960)
    with running(
        systems_folder / "looping-logs", model, drafters=("suffix", "prompt_lookup"), store=True, router_flags=FIXED
    ) as system:
        minions = ("--vote", "majority", "--shape", "chain", "--weights", "minions", "--length", "minions")
        chain = system.add_router((*minions, *PATIENT))
        yield Looping(system, system.router, chain)


HOSTILE_DRAFTERS = {
    "good": "",
    "liar": "lie",
    "second_liar": "lie",
    "third_liar": "lie",
    "garbage": "garbage",
    "late": "delay:3",
}
"""Drafter id to its fault. All liars propose the same wrong tokens. `late` answers long after the hard deadline."""
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


@pytest.fixture(scope="session")
def hostile(systems_folder: Path) -> Iterator[System]:
    """Drafters that lie, talk garbage or come late, beside a good one, before the target with known cycles."""
    model = make_looping_model(systems_folder / "hostile")
    with running(
        systems_folder / "hostile-logs",
        model,
        drafters=dict.fromkeys(HOSTILE_DRAFTERS, "prompt_lookup"),
        faults={f"drafter-{name}": f"drafter.propose={what}" for name, what in HOSTILE_DRAFTERS.items() if what},
        router_flags=(*FIXED, *DEADLINES),
    ) as system:
        yield system


@dataclass(frozen=True, slots=True)
class Voting:
    """A random llama with a suffix and a neural drafter, behind one router per vote policy."""

    system: System
    routers: dict[str, Process]


VOTES = {
    "calibrated": ("--shape", "tree", "--weights", "hedge", "--length", "fixed"),
    "majority": ("--shape", "chain", "--weights", "minions", "--length", "minions"),
    "accumulated": ("--shape", "siblings", "--weights", "uniform", "--length", "fixed"),
    "best": ("--shape", "chain", "--weights", "hedge", "--length", "goodput"),
}
"""Vote policy to the other policies beside it: every policy of every kind is there once at least."""


@pytest.fixture(scope="module")
def voting(systems_folder: Path) -> Iterator[Voting]:
    model = make_tiny_model(systems_folder / "llama")
    draft = make_alike(model, systems_folder / "llama-draft")
    with running(
        systems_folder / "llama-logs",
        model,
        drafters=("suffix", "neural"),
        drafter_flags=("--model", str(draft), "--num-threads", "1"),
        router_flags=("--vote", "calibrated", *VOTES["calibrated"], *PATIENT),
    ) as system:
        routers = {"calibrated": system.router}
        for vote, flags in list(VOTES.items())[1:]:
            routers[vote] = system.add_router(("--vote", vote, *flags, *PATIENT))
        yield Voting(system, routers)


@pytest.fixture(scope="session")
def short_sighted(systems_folder: Path) -> Iterator[System]:
    """A random qwen3; drafter `suffix` knows 64 tokens of context, drafter `prompt_lookup` (in the router) all."""
    model = make_tiny_model(systems_folder / "qwen3", family="qwen3")
    with running(
        systems_folder / "qwen3-logs",
        model,
        drafters=("suffix",),
        drafter_flags=("--option", "context_limit=64"),
        router_flags=("--in-process-drafters", "prompt_lookup", *FIXED),
    ) as system:
        yield system


@pytest.fixture(scope="module")
def narrow(systems_folder: Path) -> Iterator[System]:
    """The target with known cycles behind links that carry frames of at most 16 KiB, the same on both sides."""
    model = make_looping_model(systems_folder / "narrow", context=40_960)
    limit = ("--max-message-bytes", str(NARROW_BYTES))
    with running(
        systems_folder / "narrow-logs",
        model,
        drafters=("prompt_lookup",),
        verifier_flags=limit,
        drafter_flags=limit,
        router_flags=(*limit, *FIXED),
    ) as system:
        yield system


@dataclass(frozen=True, slots=True)
class Scripted:
    """A real router process before a scripted verifier and a scripted drafter, which run on a thread of this process.

    `text` is what every request must get."""

    router: Process
    verifier: ScriptedVerifier
    drafter: ScriptedDrafter
    text: ScriptedText


@pytest.fixture
def scripted(systems_folder: Path, tmp_path: Path) -> Iterator[Scripted]:
    model = systems_folder / "tokenizer-only"
    byte_tokenizer().save_pretrained(model)
    fingerprint = tokenizer_fingerprint(load_tokenizer(model))
    text = ScriptedText(vocab_size=259, end_token_id=258)
    with ExitStack() as stack:
        loop = stack.enter_context(LoopThread())
        verifier = ScriptedVerifier(text, tokenizer_fingerprint=fingerprint)
        drafter = ScriptedDrafter(text, tokenizer_fingerprint=fingerprint)
        for peer in (verifier, drafter):
            loop.run(peer.start())
            stack.callback(lambda peer=peer: loop.run(peer.kill()))
        supervisor = stack.enter_context(Supervisor(tmp_path))
        system = System(supervisor, model, verifiers=[], drafters={}, store=None)
        peers = ("--verifiers", verifier.address, "--drafters", f"scripted={drafter.address}")
        router = system.add_router((*peers, *FIXED))
        eventually(lambda: router.metric("moot_peers", role="drafter", state="ready") == 1, "the drafter is ready")
        yield Scripted(router, verifier, drafter, text)


class LoopThread:
    """An event loop on a thread of its own, so that synchronous tests can run servers."""

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SETTLE_S)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(SETTLE_S)


@pytest.fixture(scope="module")
def gpt_neox(systems_folder: Path) -> Iterator[System]:
    """A random gpt_neox with drafters in the router's process only."""
    model = make_tiny_model(systems_folder / "gpt_neox", family="gpt_neox")
    with running(systems_folder / "gpt_neox-logs", model, router_flags=(*IN_PROCESS, *FIXED)) as system:
        yield system


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
