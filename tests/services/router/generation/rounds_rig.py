"""The seam "rounds": a router's rounds against scripted peers over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.policy import SpeculationOptions, make_policy
from moot.core.types import FinishReason, SamplingParams
from moot.drafters.interface import Drafter
from moot.drafters.registry import create
from moot.runtime.metrics import Metrics
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier, byte_tokenizer
from services.router.api.text import IncrementalText, StopStrings
from services.router.api.tokenization import TokenBytes
from services.router.generation.drafter_set import DrafterSet
from services.router.generation.request_types import GenerationChunk, GenerationMetrics, GenerationRequest
from services.router.generation.rounds import Rounds, ServedModel
from services.router.peers.drafter_pools import DrafterPool
from services.router.peers.links import LinkPolicy, PeerState
from services.router.peers.local_drafters import LocalPool
from services.router.peers.outlier_ejection import EjectionPolicy
from services.router.peers.targets import VerifierPool
from services.router.peers.verifier_link import TargetPolicy
from services.router.store import MemoryStore
from tests.waiting import GIVE_UP_S, eventually

TEXT = ScriptedText()
BYTES = TokenBytes(byte_tokenizer())
LINK = LinkPolicy(describe_timeout_ms=5000, backoff_min_s=0.02, backoff_max_s=0.2, refused_retry_s=0.2)
TARGET = TargetPolicy(
    heartbeat_interval_s=0.1,
    max_missed_heartbeats=1000,
    open_timeout_s=GIVE_UP_S,
    verify_timeout_s=GIVE_UP_S,
    no_verifier_wait_s=GIVE_UP_S,
    suspect_wait_s=1.0,
)
WATCHFUL_TARGET = replace(TARGET, heartbeat_interval_s=0.25, max_missed_heartbeats=3)
"""For the rules of heartbeats."""
BALLOT = CollectionPolicy(soft_deadline_ms=GIVE_UP_S * 1000, hard_deadline_ms=GIVE_UP_S * 1000)
"""Nobody is late on a loaded machine; a round goes on when all have answered."""
QUICK_BALLOT = CollectionPolicy(soft_deadline_ms=50, hard_deadline_ms=100)
"""Where a drafter is late on purpose."""


@dataclass
class Outcome:
    """What a client got."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    chunks: list[GenerationChunk] = field(default_factory=list)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason

    @property
    def metrics(self) -> GenerationMetrics:
        metrics = self.chunks[-1].metrics
        assert metrics is not None
        return metrics


@dataclass
class Rig:
    text: ScriptedText
    verifiers: list[ScriptedVerifier]
    drafters: dict[str, list[ScriptedDrafter]]
    targets: VerifierPool
    pools: dict[str, DrafterPool]
    drafter_set: DrafterSet
    rounds: Rounds
    metrics: Metrics
    store: Any

    async def generate(self, request: GenerationRequest, stops: Sequence[str] = (), **text: Any) -> Outcome:
        outcome = Outcome()
        async for chunk in self.rounds.generate(request, self.assembler(request.params, stops, **text)):
            outcome.chunks.append(chunk)
            outcome.token_ids += chunk.token_ids
            outcome.text += chunk.text
        return outcome

    async def check(self, request: GenerationRequest) -> Outcome:
        """Generate: ids and end are those of plain decoding."""
        outcome = await self.generate(request)
        assert (outcome.token_ids, outcome.finish_reason) == self.plain(request)
        return outcome

    async def check_all(self, requests: Iterable[GenerationRequest]) -> list[Outcome]:
        """As `check`, all at once."""
        return await asyncio.gather(*map(self.check, requests))

    def begin(self, requests: Iterable[GenerationRequest]) -> asyncio.Task[list[Outcome]]:
        """As `check_all`, in a task of its own."""
        return asyncio.create_task(self.check_all(requests))

    async def started(self, request: GenerationRequest, rounds: int = 5) -> asyncio.Task[Outcome]:
        """As `check`, in a task of its own, which is past so many rounds."""
        task = asyncio.create_task(self.check(request))
        await eventually(lambda: self.counter("rounds_total") > rounds)
        return task

    def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        return self.rounds.generate(request, self.assembler(request.params))

    def assembler(self, params: SamplingParams, stops: Sequence[str] = (), **text: Any) -> IncrementalText:
        return IncrementalText(
            BYTES,
            stops=StopStrings(tuple(stops)),
            min_tokens=params.min_tokens,
            ending_token_ids=params.ending_token_ids(self.text.end_token_ids),
            **text,
        )

    def plain(self, request: GenerationRequest) -> tuple[tuple[int, ...], FinishReason]:
        limit = self.verifiers[0].info.context_limit
        return self.text.plain(request.prompt_token_ids, request.params, limit)

    def counter(self, name: str, **labels: str) -> float:
        """The value of a sample; 0 before its first move."""
        return sum(sample.value for sample in self._samples(name) if sample.labels == labels)

    def total(self, name: str) -> float:
        """Sum over all labels."""
        return sum(sample.value for sample in self._samples(name))

    def _samples(self, name: str) -> list[Any]:
        registry, full = self.metrics.registry, f"moot_{name}"
        # Waits ask for the same again and again: first the family of that name alone, which not every collector tells.
        for families in (registry.restricted_registry([full]), registry):
            samples = [one for family in families.collect() for one in family.samples if one.name == full]
            if samples:
                return samples
        return []

    @property
    def num_left(self) -> int:
        """Everything that a request holds anywhere: 0 when none runs."""
        held = sum(link.load + link.pool.num_held for link in self.targets.links.values())
        held += sum(link.load for pool in self.pools.values() for link in pool.links.values())
        held += sum(pool.num_sessions for pool in self.drafter_set.sources.values() if isinstance(pool, LocalPool))
        held += sum(verifier.num_sessions for verifier in self.verifiers)
        return held + sum(drafter.num_sessions for pool in self.drafters.values() for drafter in pool)

    def add_local(self, drafter_id: str, drafter: Drafter[Any] | None = None) -> LocalPool:
        """A drafter in the router's own process: this one, or one of the kind that has its id as name."""
        drafter = drafter or create(drafter_id, {"vocab_size": self.text.vocab_size})
        pool = LocalPool(drafter_id, drafter, EjectionPolicy(eject_s=600), self.metrics)
        self.drafter_set.policy.admit(drafter_id, drafter.family)
        self.drafter_set.sources[drafter_id] = pool
        return pool

    async def join(self, *verifiers: ScriptedVerifier) -> None:
        """Verifiers more: they are started, and the router is told of them."""
        for verifier in verifiers:
            await verifier.start()
        self.verifiers += verifiers
        await self.targets.set_addresses([*self.targets.links, *(verifier.address for verifier in verifiers)])

    async def ready(self, count: int) -> None:
        """So many verifiers can be used."""
        await eventually(lambda: sum(link.is_ready for link in self.targets.links.values()) == count)

    async def nothing_left(self) -> None:
        """Soon nothing of any request is left anywhere, and the gauges are back."""
        await eventually(lambda: self.num_left == 0)
        assert self.rounds.num_running == 0
        assert self.counter("pool_depth") == 0


_numbers = iter(range(10**9))


def request(prompt: Sequence[int] = b"hello", **fields: Any) -> GenerationRequest:
    params = {key: fields.pop(key) for key in list(fields) if key in SamplingParams.__slots__}
    params = {"temperature": 0.0, "max_tokens": 40} | params
    return GenerationRequest(
        request_id=fields.pop("request_id", f"req-{next(_numbers)}"),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**params),
        **fields,
    )


def _replicas(text: ScriptedText, asked: list[ScriptedDrafter] | ScriptedDrafter | float) -> list[ScriptedDrafter]:
    if isinstance(asked, list):
        return asked
    return [asked if isinstance(asked, ScriptedDrafter) else ScriptedDrafter(text, spoil=asked)]


@asynccontextmanager
async def rig(
    *,
    text: ScriptedText = TEXT,
    verifiers: Sequence[ScriptedVerifier] | int = 1,
    step_s: float | None = None,
    drafters: Mapping[str, list[ScriptedDrafter] | ScriptedDrafter | float] = MappingProxyType({}),
    tries: CollectionPolicy = BALLOT,
    failures: EjectionPolicy | None = None,
    link: LinkPolicy = LINK,
    target: TargetPolicy = TARGET,
    verifier_addresses: Sequence[str] | None = None,
    wait_for_drafters: bool = True,
    store: Any = None,
    max_buffered_commits: int = 64,
    **policy: Any,
) -> AsyncIterator[Rig]:
    """`verifiers`: they, or how many; `step_s`: what a step of each of them costs; `drafters`: the replicas of each, or
    its only one, or with what chance its only one spoils an answer. When its test is over, nothing is left."""
    verifiers = [ScriptedVerifier(text) for _ in range(verifiers)] if isinstance(verifiers, int) else list(verifiers)
    for verifier in verifiers:
        verifier.step_s = verifier.step_s if step_s is None else step_s
    replicas = {drafter_id: _replicas(text, one) for drafter_id, one in drafters.items()}
    metrics = Metrics()
    servers = [*verifiers, *(drafter for pool in replicas.values() for drafter in pool)]
    for server in servers:
        await server.start()
    targets = VerifierPool(
        link,
        target,
        "scripted",
        metrics,
        on_attached=lambda one: drafter_set.admit_attached(one.drafter_id, one.family),
    )
    chosen = {"num_speculative_tokens": 6, "length": "fixed", "shape": "chain", "asks": "all"} | policy
    bundle = make_policy(SpeculationOptions(**chosen))
    drafter_set = DrafterSet(bundle, tries, metrics)
    pools = {
        drafter_id: DrafterPool(
            drafter_id,
            link,
            failures or EjectionPolicy(eject_s=0.5, warm_up_s=0.05),
            lambda: targets.fingerprint,
            metrics,
            lambda: drafter_set.note_available(one.drafter_id for one in pools.values() if one.is_available),
            bundle.admit,
            round(1000 * tries.hard_deadline_s),
        )
        for drafter_id in replicas
    }
    drafter_set.sources.update(pools)
    rounds = Rounds(
        targets,
        drafter_set,
        store or MemoryStore(),
        ServedModel("scripted", "scripted"),
        metrics,
        max_buffered_commits=max_buffered_commits,
    )
    try:
        await targets.set_addresses(verifier_addresses or [verifier.address for verifier in verifiers])
        await eventually(lambda: all(link.state is not PeerState.CONNECTING for link in targets.links.values()))
        await eventually(lambda: not targets.links or targets.is_available)
        for drafter_id, pool in pools.items():
            await pool.set_addresses([drafter.address for drafter in replicas[drafter_id]])
        if wait_for_drafters:
            for pool in pools.values():
                await eventually(lambda pool=pool: all(link.is_ready for link in pool.links.values()))
        made = Rig(text, verifiers, replicas, targets, pools, drafter_set, rounds, metrics, rounds._store)
        yield made
        await made.nothing_left()
    finally:
        for pool in pools.values():
            await pool.set_addresses([])
        await targets.close()
        for server in dict.fromkeys((*servers, *verifiers)):
            await server.kill()
