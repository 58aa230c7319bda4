"""A request outlives its router: another one rebuilds it from the record alone, and the old one is fenced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from moot.core.errors import CommitFenced, LeaseHeld
from moot.core.options import make_config
from moot.core.types import FinishReason
from moot.runtime.metrics import Metrics
from moot.testing.tiny_model import make_tiny_model
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from services.router.api.text import IncrementalText
from services.router.api.tokenization import TokenBytes
from services.router.config import RouterConfig
from services.router.generation.request_types import GenerationRequest, RequestRecord
from services.router.generation.rounds import Rounds, ServedModel
from services.router.lifecycle import Peers
from services.router.store import DurableStore, open_store
from tests.integration.asking import Ask
from tests.integration.faulty import STEP_DELAY, Rig, body
from tests.integration.whole_system import System, running
from tests.waiting import GIVE_UP_S

LEASE_S = 3.0
LEASE = ("--store-lease-s", str(LEASE_S))
"""How long an owner may be silent."""


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("rebuild")
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        drafters=("suffix",),
        store=True,
        faults={"verifier-0": STEP_DELAY},
    ) as system:
        yield Rig(system)


@dataclass(frozen=True, slots=True)
class FreshRouter:
    """What a router process is made of, in this process, knowing nothing of any request."""

    rounds: Rounds
    store: DurableStore
    text: TokenBytes

    async def claim(self, request_id: str) -> RequestRecord:
        """As soon as the lease of the owner is over."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                try:
                    return await self.store.claim(request_id)
                except LeaseHeld as error:
                    await asyncio.sleep(error.retry_after_s)

    async def remainder(self, record: RequestRecord) -> tuple[list[int], str]:
        """The rest of the output of a claimed record: ids, and the text of the whole."""
        request = GenerationRequest(
            request_id=record.request_id,
            prompt_token_ids=record.prompt_token_ids,
            params=record.params,
            num_speculative_tokens=3,
            output_token_ids=record.output_token_ids,
            stop_strings=record.stop_strings,
            skip_special_tokens=record.skip_special_tokens,
            include_stop_str_in_output=record.include_stop_str_in_output,
            epoch=record.epoch,
        )
        # The end tokens do not matter here: no request of these tests may end by one.
        assembler = IncrementalText.of(request, self.text, frozenset())
        shown = assembler.push(record.output_token_ids).text
        ids: list[int] = []
        async for chunk in self.rounds.generate(request, assembler):
            assert chunk.durable
            ids.extend(chunk.token_ids)
            shown += chunk.text
        return ids, shown


@asynccontextmanager
async def fresh_router(system: System) -> AsyncIterator[FreshRouter]:
    assert system.store is not None
    config = make_config(
        RouterConfig,
        model=str(system.model),
        verifiers=tuple(process.address for process in system.verifiers),
        drafters=tuple(f"{name}={process.address}" for name, process in system.drafters.items()),
        redis_url=system.store.url,
        store_lease_s=LEASE_S,
        keepalive_time_ms=1000,
        keepalive_timeout_ms=5000,
    )
    tokenizer, metrics = load_tokenizer(config.model), Metrics()
    peers = Peers(config, tokenizer, metrics)
    store = await open_store(config.store)
    assert isinstance(store, DurableStore)
    model = ServedModel("tiny", tokenizer_fingerprint(tokenizer))
    peers.start()
    try:
        rounds = Rounds(peers.targets, peers.drafter_set, store, model, metrics, config.max_buffered_commits)
        yield FreshRouter(rounds, store, TokenBytes(tokenizer))
        assert rounds.num_running == 0
    finally:
        await peers.close()
        await store.close()


@pytest.mark.parametrize("index", [0, 1], ids=["greedy", "sampled"])
def test_a_dead_routers_request_goes_on_elsewhere(rig: Rig, index: int) -> None:
    """The record alone gives the identical remainder, and holds everything that the client was shown."""
    right = rig.expected(body(index, max_tokens=300))
    owner = rig.system.add_router(LEASE)
    ask = Ask(owner.port, body(index, max_tokens=300))
    ask.wait_tokens(10)
    owner.kill()
    seen = ask.result()
    assert not seen.is_complete

    async def go_on() -> tuple[RequestRecord, list[int], str]:
        async with fresh_router(rig.system) as router:
            record = await router.claim(f"{seen.request_id}-0")
            ids, text = await router.remainder(record)
            ended = await router.store.load(record.request_id)
            assert ended is not None
            assert ended.finish_reason is FinishReason.LENGTH
            assert list(ended.output_token_ids) == right.token_ids
            return record, ids, text

    record, ids, text = asyncio.run(go_on())
    committed = list(record.output_token_ids)
    assert committed[: len(seen.token_ids)] == seen.token_ids, "committed before it was shown"
    assert 0 < len(ids) < len(right.token_ids), "neither from the start nor at the end"
    assert committed + ids == right.token_ids
    assert text == right.text
    rig.system.assert_idle()


def test_a_router_that_wakes_again_is_fenced(rig: Rig) -> None:
    """A frozen router lost its request to another one: its commits are refused, its client gets no token more."""
    right = rig.expected(body(1, max_tokens=300))
    owner = rig.system.add_router(LEASE)
    ask = Ask(owner.port, body(1, max_tokens=300))
    ask.wait_tokens(10)
    owner.freeze()
    frozen_at = time.monotonic()

    async def take_over() -> RequestRecord:
        async with fresh_router(rig.system) as router:
            record = await router.claim(f"{ask.reply.request_id}-0")
            assert time.monotonic() - frozen_at > LEASE_S / 4, "a living owner was robbed"
            length = len(record.output_token_ids)
            with pytest.raises(CommitFenced):
                await router.store.commit(record.request_id, record.epoch - 1, length, [97])
            owner.thaw()
            seen = await asyncio.to_thread(ask.result)
            assert seen.error is not None, seen
            assert seen.error["code"] == "store"
            assert not seen.is_complete
            assert seen.token_ids == right.token_ids[: len(seen.token_ids)]
            assert len(seen.token_ids) <= length, "shown without a commit"
            ids, _ = await router.remainder(record)
            assert list(record.output_token_ids) + ids == right.token_ids
            ended = await router.store.load(record.request_id)
            assert ended is not None
            return ended

    ended = asyncio.run(take_over())
    assert list(ended.output_token_ids) == right.token_ids
    assert ended.finish_reason is FinishReason.LENGTH
    rig.system.assert_idle()
    owner.terminate()
    assert owner.wait() == 0
