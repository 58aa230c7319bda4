"""From the first token to the last, and what is left when a client, a store or a reader does not go along."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from moot.core.errors import CommitFenced, InvalidRequest, NoCapacity
from moot.core.types import FinishReason
from moot.testing import ScriptedDrafter, ScriptedText
from services.router.api.text import IncrementalText
from services.router.generation.request_types import GenerationRequest, RequestRecord
from services.router.store import MemoryStore
from tests.services.router.generation.rounds_rig import BYTES, TARGET, TEXT, request, rig
from tests.waiting import GIVE_UP_S, eventually

GOOD = {"good": 0.3}


async def test_c24_client_gone_a_hundred_times_leaves_nothing() -> None:
    """Whoever leaves after the first chunk, in the middle or before it: all is freed, drafters and verifier are told.
    No abort is sent for a normal end."""
    draw = random.Random(1)
    async with rig(step_s=0.001, drafters=GOOD) as router:
        (verifier,), (drafter,) = router.verifiers, router.drafters["good"]

        async def leave(after: int) -> None:
            """By tokens: how many come in one chunk depends on when its reader has its turn."""
            async with contextlib.aclosing(router.stream(request(max_tokens=10_000))) as chunks:
                seen = 0
                async for chunk in chunks:
                    seen += len(chunk.token_ids)
                    if seen >= after:
                        return

        for _ in range(5):
            await asyncio.gather(*(leave(draw.choice((1, 1, 5, 15))) for _ in range(20)))
        await eventually(lambda: router.num_left == 0)
        assert verifier.counts["abort"] == 100
        # Before the first token: told to go while their openings wait, and while they are computed.
        opened = verifier.counts["open"]
        verifier.freeze()
        tasks = [asyncio.create_task(router.generate(request(max_tokens=10_000))) for _ in range(10)]
        await eventually(lambda: verifier.counts["open"] == opened + 10)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await eventually(lambda: verifier.counts["abort"] == 110)
        verifier.thaw()
        await router.nothing_left()
        aborts = verifier.counts["abort"], drafter.counts["abort"]
        for _ in range(5):
            await router.generate(request(max_tokens=20))
        stopped = await router.generate(request(prompt=b"stop", max_tokens=10_000), stops=["a"])
        assert stopped.finish_reason is FinishReason.STOP
        await router.nothing_left()
        assert (verifier.counts["abort"], drafter.counts["abort"]) == aborts
        assert drafter.counts["finish"] == 6
        # A verifier ends by itself what it sees ending; only the stop string had to be told.
        assert verifier.counts["finish"] == 1


async def test_a_slow_reader_pauses_its_own_request_only() -> None:
    """The buffer of a request whose reader sleeps is bounded; its neighbour runs to its end meanwhile."""
    async with rig(max_buffered_commits=4) as router:
        (verifier,), slow = router.verifiers, request(max_tokens=300)
        chunks = router.stream(slow)
        first = await anext(chunks)
        await router.check(request(max_tokens=100))
        before = verifier.counts["verify"]
        await asyncio.sleep(0.05)
        assert verifier.counts["verify"] == before
        assert before < 100 + 10
        rest = [chunk async for chunk in chunks]
        assert len(rest[0].token_ids) > 1, "what piled up comes as one span"
        tokens = first.token_ids + tuple(token for chunk in rest for token in chunk.token_ids)
        assert tokens == router.plain(slow)[0]


class WatchedStore(MemoryStore):
    """A store that can be held up, and that tells what it has. `look`: what is to be noted at every commit."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.committed: dict[str, int] = {}
        self.fence_after: int | None = None
        self.look: Callable[[], float] = lambda: 0
        self.seen: list[tuple[int, float]] = []
        """Of every commit the output tokens behind it, and what was to be noted."""

    async def commit(self, request_id: str, epoch: int, expected_length: int, *span: Any) -> bool:
        self.seen.append((expected_length + len(span[0]), self.look()))
        await self.answers.wait()
        if self.fence_after is not None and expected_length >= self.fence_after:
            raise CommitFenced("another owner has claimed this request")
        done = await super().commit(request_id, epoch, expected_length, *span)
        self.committed[request_id] = expected_length + len(span[0])
        return done

    async def record(self, request_id: str) -> RequestRecord:
        record = await self.load(request_id)
        assert record is not None
        return record


async def test_no_token_is_shown_before_its_commit_and_rounds_go_on_meanwhile() -> None:
    """Commit before emit; and a slow store delays what is shown, not the rounds behind it."""
    store = WatchedStore()
    async with rig(store=store) as router:
        asked, shown = request(max_tokens=60), 0
        chunks = router.stream(asked)
        async for chunk in chunks:
            shown += len(chunk.token_ids)
            assert store.committed[asked.request_id] >= shown
            if 10 < shown < 40:
                store.answers.clear()
                waiting = asyncio.ensure_future(anext(chunks))
                rounds = router.counter("rounds_total")
                await eventually(lambda rounds=rounds: router.counter("rounds_total") > rounds + 15)
                assert not waiting.done()
                store.answers.set()
                shown += len((await waiting).token_ids)
                assert store.committed[asked.request_id] >= shown
        assert shown == 60
        record = await store.record(asked.request_id)
        assert (record.output_token_ids, record.finish_reason) == router.plain(asked)
        assert router.counter("rounds_total") == 59
        assert len(store.seen) < 60 - 15, "rounds waited for commits"


async def test_the_next_questions_are_written_before_a_round_is_committed_and_shown() -> None:
    """Peers that wait for the router's word get it before the router does what can wait: every drafter has its next
    question on the wire when the span before it goes to the store."""
    store = WatchedStore()
    drafters = {name: ScriptedDrafter(TEXT, spoil=0.5, seed=seed) for seed, name in enumerate(("one", "two"))}
    async with rig(drafters=drafters, store=store) as router:
        store.look = lambda: router.counter("round_turn_seconds_count", stage="propose")
        await router.check(request(max_tokens=80))
        # The last rounds may have nothing left to ask for.
        noted = [num_written for length, num_written in store.seen if length < 70]
        assert len(noted) > 10
        assert all(num_written >= 2 * index for index, num_written in enumerate(noted, start=1))


async def test_a_fenced_router_stops_and_leaves_the_record_alone() -> None:
    """Another owner's claim ends the request here, frees everything and writes nothing more."""
    store = WatchedStore()
    async with rig(store=store, drafters=GOOD) as router:
        store.fence_after = 10
        with pytest.raises(CommitFenced):
            await router.generate(request(request_id="mine", max_tokens=100))
        assert (await store.record("mine")).finish_reason is None


async def test_records_are_closed_for_whatever_reason_a_request_ends() -> None:
    """Client gone: abort. A fault of the request: error. A fault around it, in mid-stream: left open to be resumed."""
    store = WatchedStore()
    async with rig(store=store, step_s=0.002, target=replace(TARGET, no_verifier_wait_s=0.3)) as router:
        (verifier,) = router.verifiers
        gone = request(max_tokens=1000)
        chunks = router.stream(gone)
        await anext(chunks)
        await chunks.aclose()
        assert (await store.record(gone.request_id)).finish_reason is FinishReason.ABORT
        verifier.poison = {"poisoned"}
        with pytest.raises(Exception, match="not finite"):
            await router.generate(request(request_id="poisoned"))
        assert (await store.record("poisoned")).finish_reason is FinishReason.ERROR
        running = asyncio.create_task(router.generate(request(request_id="open", max_tokens=1000)))
        await eventually(lambda: store.committed.get("open", 0) > 3)
        await verifier.kill()
        with pytest.raises(NoCapacity):
            await running
        assert (await store.record("open")).finish_reason is None


class StuckStore(WatchedStore):
    """Commits after the first are applied or not, as told, and then never answered: the caller has to go."""

    def __init__(self, applies: bool) -> None:
        super().__init__()
        self.applies = applies
        self.stuck = asyncio.Event()
        self.released: list[str] = []

    async def commit(self, request_id: str, epoch: int, expected_length: int, *span: Any) -> bool:
        answers = expected_length == 0 or self.stuck.is_set()
        done = False
        if answers or self.applies:
            done = await super().commit(request_id, epoch, expected_length, *span)
        if not answers:
            self.stuck.set()
            await asyncio.Event().wait()
        return done

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.released.append(request_id)


@pytest.mark.parametrize("applies", [True, False])
async def test_a_client_that_leaves_during_a_commit_leaves_a_closed_record(applies: bool) -> None:
    """Whether the commit that was cut off had been applied or not, the record ends whole, and is let go of."""
    store = StuckStore(applies)
    async with rig(store=store) as router:
        asked = request(max_tokens=1000)
        task = asyncio.create_task(router.generate(asked))
        await asyncio.wait_for(store.stuck.wait(), GIVE_UP_S)
        task.cancel()
        await asyncio.wait([task])
        record = await store.record(asked.request_id)
        assert record.finish_reason is FinishReason.ABORT
        output = record.output_token_ids
        assert len(output) > 1
        assert output == router.plain(asked)[0][: len(output)]
        assert store.released == [asked.request_id]


async def test_a_claimed_request_goes_on_where_it_stopped() -> None:
    """Prompt + committed tokens + epoch are enough: the remainder is identical and continues the same record."""
    store = WatchedStore()
    async with rig(store=store, drafters=GOOD) as router:
        fields: dict[str, Any] = {"request_id": "r", "max_tokens": 50, "temperature": 1.0, "seed": 7}
        whole = request(**fields)
        expected = router.plain(whole)[0]
        record = RequestRecord("r", 3, whole.prompt_token_ids, expected[:20], whole.params, "scripted", "scripted")
        await store.create(record)
        outcome = await router.generate(request(**fields, output_token_ids=expected[:20], epoch=3))
        assert outcome.token_ids == expected[20:]
        assert outcome.metrics.num_output_tokens == 50
        loaded = await store.record("r")
        assert (loaded.output_token_ids, loaded.finish_reason) == router.plain(whole)


async def test_unknown_drafter_is_a_parameter_error_and_costs_nothing() -> None:
    """`drafters` may only name drafters of this router; the message lists them."""
    async with rig(drafters=GOOD) as router:
        with pytest.raises(InvalidRequest, match="good") as caught:
            await router.generate(request(drafters=("good", "nobody")))
        assert caught.value.param == "drafters"
        assert router.verifiers[0].counts["open"] == 0


async def test_the_first_token_waits_for_no_drafter() -> None:
    """Speculation never delays the first token: it comes from the opening."""
    async with rig(drafters=GOOD) as router:
        asked = request(max_tokens=20)
        chunks = router.stream(asked)
        first = await anext(chunks)
        assert first.token_ids == router.plain(asked)[0][:1]
        assert router.drafters["good"][0].counts["propose"] <= 1
        assert router.counter("rounds_total") <= 1
        await chunks.aclose()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("include_stop", [True, False])
async def test_a_record_is_enough_for_the_text(special: bool, include_stop: bool) -> None:
    """Stop strings, and whether they and special tokens show: what is rebuilt from a record is what would have been
    shown, wherever its owner went away."""
    text, store = ScriptedText(end_period=15), WatchedStore()
    async with rig(text=text, store=store) as router:

        async def run(asked: GenerationRequest) -> tuple[tuple[int, ...], str]:
            assembler = IncrementalText.of(asked, BYTES, text.end_token_ids)
            shown = assembler.push(asked.output_token_ids).text
            ids = asked.output_token_ids
            async for chunk in router.rounds.generate(asked, assembler):
                ids, shown = ids + chunk.token_ids, shown + chunk.text
            return ids, shown

        fields = {"max_tokens": 60, "ignore_eos": True}
        ids, shown = await run(request(skip_special_tokens=False, **fields))
        assert "<|end|>" in shown
        stop = next(shown[at : at + 2] for at in range(len(shown) // 2, len(shown)) if shown[at : at + 2].isascii())
        asked = request(
            stop_strings=(stop,), skip_special_tokens=special, include_stop_str_in_output=include_stop, **fields
        )
        ids, shown = await run(asked)
        assert shown.endswith(stop) is include_stop
        whole = await store.record(asked.request_id)
        for kept in range(len(ids)):
            record = replace(whole, request_id=f"r{kept}", output_token_ids=ids[:kept], finish_reason=None)
            await store.create(record)
            names = {field.name for field in dataclasses.fields(GenerationRequest)}
            known = {name: value for name, value in dataclasses.asdict(record).items() if name in names}
            assert await run(GenerationRequest(**known | {"params": record.params})) == (ids, shown)
