"""From the first token to the last, and what is left when a client, a store or a reader does not go along."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from moot.core.errors import CommitFenced, InvalidRequest, NoCapacity
from moot.core.types import FinishReason
from moot.testing import ScriptedDrafter, ScriptedText, ScriptedVerifier
from services.router.api.text import IncrementalText
from services.router.generation.request_types import GenerationRequest, RequestRecord
from services.router.store import MemoryStore
from tests.services.router.generation.rounds_rig import BYTES, TARGET, request, rig
from tests.waiting import GIVE_UP_S, eventually

TEXT = ScriptedText()


def good() -> dict[str, list[ScriptedDrafter]]:
    return {"good": [ScriptedDrafter(TEXT, spoil=0.3)]}


def test_c24_client_gone_a_hundred_times_leaves_nothing() -> None:
    """Whoever leaves after the first chunk, in the middle or before it: all is freed, drafters and verifier are told.
    No abort is sent for a normal end."""

    async def main() -> None:
        draw = random.Random(1)
        verifier, drafters = ScriptedVerifier(TEXT), good()
        verifier.step_s = 0.001
        async with rig(text=TEXT, verifiers=[verifier], drafters=drafters) as router:

            async def leave(after: int) -> None:
                """By tokens: how many come in one chunk depends on when its reader has its turn."""
                asked = request(max_tokens=10_000)
                chunks = router.rounds.generate(asked, router.assembler(asked.params))
                async with contextlib.aclosing(chunks):
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
            aborts = verifier.counts["abort"], drafters["good"][0].counts["abort"]
            for _ in range(5):
                await router.generate(request(max_tokens=20))
            stopped = await router.generate(request(prompt=b"stop", max_tokens=10_000), stops=["a"])
            assert stopped.finish_reason is FinishReason.STOP
            await router.nothing_left()
            assert (verifier.counts["abort"], drafters["good"][0].counts["abort"]) == aborts
            assert drafters["good"][0].counts["finish"] == 6
            # A verifier ends by itself what it sees ending; only the stop string had to be told.
            assert verifier.counts["finish"] == 1

    asyncio.run(main())


def test_a_slow_reader_pauses_its_own_request_only() -> None:
    """The buffer of a request whose reader sleeps is bounded; its neighbour runs to its end meanwhile."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        async with rig(text=TEXT, verifiers=[verifier], max_buffered_commits=4) as router:
            slow = request(max_tokens=300)
            chunks = router.rounds.generate(slow, router.assembler(slow.params))
            first = await anext(chunks)
            neighbour = request(max_tokens=100)
            assert (await router.generate(neighbour)).token_ids == router.plain(neighbour)[0]
            before = verifier.counts["verify"]
            await asyncio.sleep(0.05)
            assert verifier.counts["verify"] == before
            assert before < 100 + 10
            rest = [chunk async for chunk in chunks]
            assert len(rest[0].token_ids) > 1, "what piled up comes as one span"
            tokens = first.token_ids + tuple(token for chunk in rest for token in chunk.token_ids)
            assert tokens == router.plain(slow)[0]
            await router.nothing_left()

    asyncio.run(main())


class WatchedStore(MemoryStore):
    """A store that can be held up, and that tells what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.num_commits = 0
        self.committed: dict[str, int] = {}
        self.endings: dict[str, FinishReason] = {}
        self.fence_after: int | None = None

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        await self.answers.wait()
        self.num_commits += 1
        if self.fence_after is not None and expected_length >= self.fence_after:
            raise CommitFenced("another owner has claimed this request")
        done = await super().commit(request_id, epoch, expected_length, token_ids, finish_reason)
        self.committed[request_id] = expected_length + len(token_ids)
        if finish_reason is not None:
            self.endings[request_id] = finish_reason
        return done


def test_no_token_is_shown_before_its_commit_and_rounds_go_on_meanwhile() -> None:
    """Commit before emit; and a slow store delays what is shown, not the rounds behind it."""

    async def main() -> None:
        store = WatchedStore()
        async with rig(text=TEXT, store=store) as router:
            asked = request(max_tokens=60)
            shown = 0
            chunks = router.rounds.generate(asked, router.assembler(asked.params))
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
            assert store.endings[asked.request_id] is FinishReason.LENGTH
            record = await store.load(asked.request_id)
            assert record is not None
            assert record.output_token_ids == router.plain(asked)[0]
            assert router.counter("rounds_total") == 59
            assert store.num_commits < 60 - 15, "rounds waited for commits"

    asyncio.run(main())


def test_a_fenced_router_stops_and_leaves_the_record_alone() -> None:
    """Another owner's claim ends the request here, frees everything and writes nothing more."""

    async def main() -> None:
        store = WatchedStore()
        async with rig(text=TEXT, store=store, drafters=good()) as router:
            store.fence_after = 10
            with pytest.raises(CommitFenced):
                await router.generate(request(request_id="mine", max_tokens=100))
            assert "mine" not in store.endings
            await router.nothing_left()

    asyncio.run(main())


def test_records_are_closed_for_whatever_reason_a_request_ends() -> None:
    """Client gone: abort. A fault of the request: error. A fault around it, in mid-stream: left open to be resumed."""

    async def main() -> None:
        store, verifier = WatchedStore(), ScriptedVerifier(TEXT)
        verifier.step_s = 0.002
        hasty = dataclasses.replace(TARGET, no_verifier_wait_s=0.3)
        async with rig(text=TEXT, store=store, verifiers=[verifier], target=hasty) as router:
            gone = request(max_tokens=1000)
            chunks = router.rounds.generate(gone, router.assembler(gone.params))
            await anext(chunks)
            await chunks.aclose()
            assert store.endings[gone.request_id] is FinishReason.ABORT
            verifier.poison = {"poisoned"}
            with pytest.raises(Exception, match="not finite"):
                await router.generate(request(request_id="poisoned"))
            assert store.endings["poisoned"] is FinishReason.ERROR
            running = asyncio.create_task(router.generate(request(request_id="open", max_tokens=1000)))
            await eventually(lambda: store.committed.get("open", 0) > 3)
            await verifier.kill()
            with pytest.raises(NoCapacity):
                await running
            assert "open" not in store.endings

    asyncio.run(main())


class StuckStore(WatchedStore):
    """Commits after the first are applied or not, as told, and then never answered: the caller has to go."""

    def __init__(self, applies: bool) -> None:
        super().__init__()
        self.applies = applies
        self.stuck = asyncio.Event()
        self.released: list[str] = []

    async def commit(
        self,
        request_id: str,
        epoch: int,
        expected_length: int,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
    ) -> bool:
        answers = expected_length == 0 or self.stuck.is_set()
        done = False
        if answers or self.applies:
            done = await super().commit(request_id, epoch, expected_length, token_ids, finish_reason)
        if not answers:
            self.stuck.set()
            await asyncio.Event().wait()
        return done

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self.released.append(request_id)


@pytest.mark.parametrize("applies", [True, False])
def test_a_client_that_leaves_during_a_commit_leaves_a_closed_record(applies: bool) -> None:
    """Whether the commit that was cut off had been applied or not, the record ends whole, and is let go of."""

    async def main() -> None:
        store = StuckStore(applies)
        async with rig(text=TEXT, store=store) as router:
            asked = request(max_tokens=1000)
            task = asyncio.create_task(router.generate(asked))
            await asyncio.wait_for(store.stuck.wait(), GIVE_UP_S)
            task.cancel()
            await asyncio.wait([task])
            record = await store.load(asked.request_id)
            assert record is not None
            assert record.finish_reason is FinishReason.ABORT
            output = record.output_token_ids
            assert len(output) > 1
            assert output == router.plain(asked)[0][: len(output)]
            assert store.released == [asked.request_id]
            await router.nothing_left()

    asyncio.run(main())


def test_a_claimed_request_goes_on_where_it_stopped() -> None:
    """Prompt + committed tokens + epoch are enough: the remainder is identical and continues the same record."""

    async def main() -> None:
        store = WatchedStore()
        async with rig(text=TEXT, store=store, drafters=good()) as router:
            whole = request(request_id="r", max_tokens=50, temperature=1.0, seed=7)
            expected = router.plain(whole)[0]
            record = RequestRecord("r", 3, whole.prompt_token_ids, expected[:20], whole.params, "scripted", "scripted")
            await store.create(record)
            resumed = request(
                request_id="r",
                max_tokens=50,
                temperature=1.0,
                seed=7,
                output_token_ids=expected[:20],
                epoch=3,
            )
            outcome = await router.generate(resumed)
            assert outcome.token_ids == expected[20:]
            assert outcome.metrics.num_output_tokens == 50
            loaded = await store.load("r")
            assert loaded is not None
            assert loaded.output_token_ids == expected
            assert loaded.finish_reason is FinishReason.LENGTH

    asyncio.run(main())


def test_unknown_drafter_is_a_parameter_error_and_costs_nothing() -> None:
    """`drafters` may only name drafters of this router; the message lists them."""

    async def main() -> None:
        verifier = ScriptedVerifier(TEXT)
        async with rig(text=TEXT, verifiers=[verifier], drafters=good()) as router:
            with pytest.raises(InvalidRequest, match="good") as caught:
                await router.generate(request(drafters=("good", "nobody")))
            assert caught.value.param == "drafters"
            assert verifier.counts["open"] == 0
            await router.nothing_left()

    asyncio.run(main())


def test_the_first_token_waits_for_no_drafter() -> None:
    """Speculation never delays the first token: it comes from the opening."""

    async def main() -> None:
        drafters = good()
        async with rig(text=TEXT, drafters=drafters) as router:
            asked = request(max_tokens=20)
            chunks = router.rounds.generate(asked, router.assembler(asked.params))
            first = await anext(chunks)
            assert first.token_ids == router.plain(asked)[0][:1]
            assert drafters["good"][0].counts["propose"] <= 1
            assert router.counter("rounds_total") <= 1
            await chunks.aclose()

    asyncio.run(main())


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("include_stop", [True, False])
def test_a_record_is_enough_for_the_text(special: bool, include_stop: bool) -> None:
    """Stop strings, and whether they and special tokens show: what is rebuilt from a record is what would have been
    shown, wherever its owner went away."""

    async def main() -> None:
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
            whole = await store.load(asked.request_id)
            assert whole is not None
            for kept in range(len(ids)):
                record = replace(whole, request_id=f"r{kept}", output_token_ids=ids[:kept], finish_reason=None)
                await store.create(record)
                names = {field.name for field in dataclasses.fields(GenerationRequest)}
                known = {name: value for name, value in dataclasses.asdict(record).items() if name in names}
                assert await run(GenerationRequest(**known | {"params": record.params})) == (ids, shown)

    asyncio.run(main())
