"""Running systems that files of tests share: real processes, started only when first used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from moot.runtime.supervisor import Supervisor
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from moot.testing.tiny_model import byte_tokenizer, make_tiny_model
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.integration.looping_model import make_looping_model
from tests.integration.shared_systems import (
    DEADLINES,
    EVERYBODY,
    FIXED,
    HOSTILE_DRAFTERS,
    IN_PROCESS,
    NARROW_BYTES,
    VOTES,
    Looping,
    LoopThread,
    Scripted,
    Voting,
    make_alike,
)
from tests.integration.whole_system import System, running
from tests.waiting import until


@pytest.fixture(scope="session")
def systems_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("systems")


@pytest.fixture(scope="session")
def looping(systems_folder: Path) -> Iterator[Looping]:
    """Drafters suffix and prompt_lookup as processes, records in a store, a context of 40960 tokens."""
    model = make_looping_model(systems_folder / "looping", context=40_960)
    with running(
        systems_folder / "looping-logs", model, drafters=("suffix", "prompt_lookup"), store=True, router_flags=FIXED
    ) as system:
        minions = ("--vote", "majority", "--shape", "chain", "--weights", "minions", "--length", "minions")
        chain = system.add_router((*minions, *EVERYBODY))
        yield Looping(system, system.router, chain)


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


@pytest.fixture(scope="module")
def voting(systems_folder: Path) -> Iterator[Voting]:
    model = make_tiny_model(systems_folder / "llama")
    draft = make_alike(model, systems_folder / "llama-draft")
    with running(
        systems_folder / "llama-logs",
        model,
        drafters=("suffix", "neural"),
        drafter_flags=("--model", str(draft), "--num-threads", "1"),
        router_flags=("--vote", "calibrated", *VOTES["calibrated"], *EVERYBODY),
    ) as system:
        routers = {"calibrated": system.router}
        for vote, flags in list(VOTES.items())[1:]:
            routers[vote] = system.add_router(("--vote", vote, *flags, *EVERYBODY))
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
        until(lambda: router.metric("moot_peers", role="drafter", state="ready") == 1, "the drafter is ready")
        yield Scripted(router, verifier, drafter, text)


@pytest.fixture(scope="module")
def gpt_neox(systems_folder: Path) -> Iterator[System]:
    """A random gpt_neox with drafters in the router's process only."""
    model = make_tiny_model(systems_folder / "gpt_neox", family="gpt_neox")
    with running(systems_folder / "gpt_neox-logs", model, router_flags=(*IN_PROCESS, *FIXED)) as system:
        yield system
