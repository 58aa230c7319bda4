"""The whole system under loads: callers over HTTP, further routers and drafters, and the figures of a load."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lab.bench.harness.prompts import PromptConfig
from lab.bench.harness.scripted import wait_serving
from lab.bench.harness.streams import closed_loop
from lab.bench.harness.watched import gained, lengths_asked, scrape
from moot.commands.common import DEMO_MODEL, say
from moot.commands.system import LOOPBACK, System, SystemConfig, drafters_of, prepared_model
from moot.config import option
from moot.runtime.supervisor import Child

LIGHT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
ConfigT = TypeVar("ConfigT", bound=SystemConfig)


@dataclass(frozen=True, kw_only=True)
class LoadConfig(PromptConfig, SystemConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    answers: int = option(8, help="answers of a load at least; one per caller where that is more")
    max_tokens: int = option(48, help="tokens of each answer")


def tiny(config: ConfigT, folder: Path) -> ConfigT:
    """With a random model that takes next to no time, where none was chosen."""
    if config.demo or config.model != DEMO_MODEL:
        return config
    from moot.testing.tiny_model import make_tiny_model

    return replace(config, model=str(make_tiny_model(folder / "tiny")))


class Routers:
    """Further routers before a running system's verifier and drafters, and drafters that only some of them have."""

    def __init__(self, system: System, config: SystemConfig) -> None:
        self._system, self._config = system, config
        self.model = str(prepared_model(config.model, say))
        self._name = system.client.models()[0]
        self._shared = {child.name.removeprefix("drafter-"): child for child in system.drafters}
        self._attached = [str(entry) for entry in drafters_of(config).in_router]

    def drafter(
        self, drafter_id: str, flags: Sequence[str], environ: Mapping[str, str], essential: bool = True
    ) -> Child:
        """A drafter process, not waited for."""
        own = ["--drafter-id", drafter_id, "--host", LOOPBACK, "--port", "0", "--metrics-port", "0"]
        own += ["--log-level", "error", *flags]
        supervisor = self._system.supervisor
        return supervisor.service(f"drafter-{drafter_id}", "drafter", own, environ=environ, essential=essential)

    def router(self, name: str, flags: Sequence[str], drafters: Mapping[str, Child]) -> Child:
        """A router, not waited for. `drafters`: by their ids, besides those that all routers have."""
        known = self._shared | dict(drafters)
        own = ["--model", self.model, "--served-model-name", self._name, "--host", LOOPBACK, "--port", "0"]
        own += ["--grpc-port", "0", "--metrics-port", "0", "--redis-url", "none", "--log-level", "warning"]
        own += ["--verifiers", f"{LOOPBACK}:{self._system.verifier.port}"]
        own += ["--drafters", ",".join(f"{id_}={LOOPBACK}:{child.port}" for id_, child in known.items())]
        own += ["--in-process-drafters", ",".join(self._attached)]
        return self._system.supervisor.service(name, "router", [*own, *flags], environ=LIGHT)

    def wait(self, children: Sequence[Child], *, are_routers: bool = False) -> None:
        self._system.supervisor.wait_ready(list(children), self._config.start_timeout_s)
        for child in children if are_routers else ():
            wait_serving(child)


@dataclass(frozen=True, slots=True)
class Load:
    """What one load was: figures by name (seconds where they end in `_s`), and its rounds by the K asked for."""

    figures: dict[str, float]
    lengths: dict[int, float]


class Loads:
    """Loads on routers of one system: callers who ask for their next answer when they have one, greedily.

    Answers of one name are compared id by id, over all loads; `differing` has the sides on which one was another."""

    def __init__(self, system: System, max_tokens: int, *, ignore_eos: bool = True) -> None:
        self._system = system
        self._shared = {
            "model": system.client.models()[0],
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": ignore_eos,
        }
        self._texts: dict[str, tuple[int, ...]] = {}
        self.differing: set[str] = set()

    def run(
        self, side: str, router: Child, prompts: Mapping[str, str], concurrency: int, body: Mapping[str, Any]
    ) -> Load:
        """`body`: further fields of the requests. Raises RequestBroken."""
        self._system.supervisor.check()
        bodies = [
            (name, self._shared | {"messages": [{"role": "user", "content": prompt}]} | dict(body))
            for name, prompt in prompts.items()
        ]
        ports = [int(child.facts["metrics_port"]) for child in (router, self._system.verifier)]
        before, verifier_before = map(scrape, ports)
        replies, seconds = asyncio.run(closed_loop(f"http://{LOOPBACK}:{router.port}", bodies, concurrency))
        after, verifier_after = map(scrape, ports)
        for reply in replies:
            if self._texts.setdefault(reply.name, reply.token_ids) != reply.token_ids:
                self.differing.add(side)
        lengths = lengths_asked(before, after)
        counts = [reply.metrics["speculative_decoding"] for reply in replies]
        tokens = sum(len(reply.token_ids) for reply in replies)
        rounds = max(sum(one["num_spec_steps"] for one in counts), 1)
        steps = max(gained(verifier_before, verifier_after, "moot_forward_seconds_count"), 1.0)

        def per_step(name: str) -> float:
            return gained(verifier_before, verifier_after, name) / steps

        figures = {
            "tokens": tokens,
            "elapsed_s": seconds,
            "tokens_per_s": tokens / seconds,
            "first_token_s": statistics.median(reply.first_token_s for reply in replies),
            "token_gap_s": statistics.fmean(gap for reply in replies for gap in reply.token_gaps),
            "rounds": rounds,
            # The first token of each answer comes with its opening.
            "tokens_per_round": (tokens - len(replies)) / rounds,
            "drafted_per_round": sum(one["num_draft_tokens"] for one in counts) / rounds,
            "mean_k": sum(k * count for k, count in lengths.items()) / max(sum(lengths.values()), 1),
            "k_changes": gained(before, after, "moot_speculation_length_changes_total"),
            "draft_s": gained(before, after, "moot_round_duration_seconds_sum", "draft") / rounds,
            "steps": steps,
            "step_s": per_step("moot_forward_seconds_sum"),
            "requests_per_step": per_step("moot_verify_batch_size_sum"),
            "tokens_per_step": per_step("moot_verify_batch_tokens_sum"),
        }
        say(
            f"{concurrency} callers, {side}: {figures['tokens_per_s']:.1f} tokens/s, mean K {figures['mean_k']:.2f},"
            f" a step of {figures['requests_per_step']:.1f} requests {1e3 * figures['step_s']:.0f} ms"
        )
        return Load(figures, lengths)
