"""A drafter over real gRPC on loopback: sessions, batches, ends, limits, draft-ahead and faults."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

import moot.runtime.faults
from moot.core.errors import ConfigError
from moot.core.options import make_config
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.drafters.registry import create
from moot.rpc.link import LinkConfig, open_channel
from moot.testing.tiny_model import make_tiny_model
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import token_pb2
from services.drafter.config import DrafterConfig
from services.drafter.serve import make_drafter_kind
from tests.services.drafter.drafter_driver import (
    GREEDY,
    Peer,
    RunningDrafter,
    finish_command,
    open_command,
    propose_command,
    running,
)
from tests.waiting import GIVE_UP_S, eventually

LOOP = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
VOCAB = ("vocab_size=50",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model", context=128)


def config(kind: str = "prompt_lookup", option: tuple[str, ...] = VOCAB, **fields: Any) -> DrafterConfig:
    return make_config(DrafterConfig, kind=kind, option=option, **fields)


def neural_config(folder: Path, **fields: Any) -> DrafterConfig:
    option = ("dtype=float64", "device=cpu", "batch_invariant=true")
    return make_config(DrafterConfig, kind="neural", model=str(folder), num_threads=1, option=option, **fields)


def with_drafter(settings: DrafterConfig, body: Callable[[RunningDrafter], Awaitable[None]], **extra: Any) -> None:
    async def main() -> None:
        async with running(settings, **extra) as drafter:
            await body(drafter)

    asyncio.run(main())


def test_a_session_from_open_to_finish() -> None:
    """Answers repeat session, round and base length; proposals carry the drafter's name; finish frees the session."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        first = await peer.ask(open_command(7, LOOP[:4], LOOP[4:]), propose_command(7, 10, round_index=1))
        assert (first.session_id, first.proposed.round_index, first.proposed.base_length) == (7, 1, 10)
        (proposal,) = first.proposed.proposals
        assert (proposal.drafter_id, list(proposal.token_ids)) == ("lookup-a", [3, 4, 1, 2])
        assert len(proposal.confidences) == 4
        assert await peer.ids(propose_command(7, 13, [3, 4, 1], 2)) == [[2, 3]]
        assert drafter.engine.num_sessions == 1
        await peer.send(finish_command(7))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert drafter.metric("moot_draft_seconds_count") == 2
        assert (await peer.ask(propose_command(7, 13))).WhichOneof("answer") == "unknown_session"

    with_drafter(config(drafter_id="lookup-a"), body)


def test_what_does_not_fit_is_answered_with_unknown_session() -> None:
    """A session that was never opened, or whose length differs, is to be opened again; nothing is guessed (C06)."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        unknown = await peer.ask(propose_command(3, 5, round_index=9))
        assert unknown.session_id == 3
        assert unknown.unknown_session.round_index == 9
        for base_length in (9, 11, 12):
            answer = await peer.ask(open_command(4, LOOP), propose_command(4, base_length, round_index=2))
            assert answer.WhichOneof("answer") == "unknown_session"
            assert answer.unknown_session.round_index == 2
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert await peer.ids(open_command(5, LOOP), propose_command(5, 10)) == [[3, 4, 1, 2]]

    with_drafter(config(), body)


def test_abstaining_is_an_answer_without_proposals() -> None:
    """A drafter with nothing to say answers at once, so that nobody waits for it."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        assert await peer.ids(open_command(1, [1, 2, 3]), propose_command(1, 3)) == []
        assert await peer.ids(open_command(2, []), propose_command(2, 0)) == []
        assert await peer.ids(open_command(3, LOOP), propose_command(3, 10, num_tokens=0)) == []

    with_drafter(config(), body)


def test_sessions_of_two_streams_never_meet() -> None:
    """Session ids are a stream's own; the end of a stream without finish frees its sessions and no other."""

    async def body(drafter: RunningDrafter) -> None:
        one, two = drafter.peer(), drafter.peer()
        assert await one.ids(open_command(1, LOOP), propose_command(1, 10)) == [[3, 4, 1, 2]]
        assert await two.ids(open_command(1, [9, 8, 9]), propose_command(1, 3, num_tokens=2)) == [[8, 9]]
        one.call.cancel()
        await eventually(lambda: drafter.engine.num_sessions == 1)
        assert await two.ids(propose_command(1, 4, [8], 1)) == [[9]]
        await two.call.done_writing()
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert drafter.metric("moot_num_sessions") == 0

    with_drafter(config(), body)


class Recording(Drafter[Any]):
    """A kind that counts how its asks come, and waits until it is let go."""

    kind = "recording"
    family = "recording"
    context_limit = 1000

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.closed: list[Any] = []
        self.fail = False
        self.entered, self.release = threading.Event(), threading.Event()

    def open(self, prefix: Sequence[int], params: SamplingParams) -> list[int]:
        return list(prefix)

    def extend(
        self, session: list[int], token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        session += token_ids

    def propose(self, asks: Sequence[Ask[Any]]) -> list[list[Proposal]]:
        self.batches.append(len(asks))
        self.entered.set()
        assert self.release.wait(GIVE_UP_S)
        if self.fail:
            raise RuntimeError("a defect of this kind")
        return [
            [Proposal((ask.session[-1],) * ask.num_speculative_tokens, (1,) * ask.num_speculative_tokens)]
            for ask in asks
        ]

    def close(self, session: Any) -> None:
        self.closed.append(session)


def test_what_waits_is_drafted_for_together() -> None:
    """While a batch is drafted, asks gather; the next batch takes them all, up to its limit."""
    kind = Recording()

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        await peer.send(open_command(1, [1]), propose_command(1, 1))
        await asyncio.to_thread(kind.entered.wait, GIVE_UP_S)
        for n in range(2, 9):
            await peer.send(open_command(n, [n]), propose_command(n, 1))
        await eventually(lambda: len(drafter.engine._inbox) == 14)
        kind.release.set()
        answers = [await peer.answer() for _ in range(8)]
        assert {a.session_id: a.proposed.proposals[0].token_ids[0] for a in answers} == {n: n for n in range(1, 9)}
        assert kind.batches == [1, 5, 2]

    with_drafter(config(max_batch=5), body, drafter=kind)


class Warming(Recording):
    """A kind that prepares a session in three pieces, each of which waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.release.set()
        self.pieces = threading.Semaphore(0)
        self.calls: list[str] = []

    def warm(self, session: list[int]) -> bool:
        self.calls.append("warm")
        assert self.pieces.acquire(timeout=GIVE_UP_S)
        return self.calls.count("warm") < 3

    def propose(self, asks: Sequence[Ask[Any]]) -> list[list[Proposal]]:
        self.calls.append("propose")
        return super().propose(asks)


def test_an_ask_does_not_wait_until_a_new_session_is_prepared() -> None:
    """Preparing a session goes on piece by piece while nobody asks: an ask waits for one piece at most."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        kind = drafter.drafter
        assert isinstance(kind, Warming)
        await peer.send(open_command(1, [1]))
        await eventually(lambda: kind.calls == ["warm"])
        await peer.send(propose_command(1, 1))
        await eventually(lambda: bool(drafter.engine._inbox))
        kind.pieces.release()
        assert (await peer.answer()).proposed.proposals
        kind.pieces.release(2)
        await eventually(lambda: all(session.is_warm for session in drafter.engine._table))
        assert kind.calls == ["warm", "propose", "warm", "warm"]

    with_drafter(config(), body, drafter=Warming())


def test_expired_and_superseded_asks_are_dropped() -> None:
    """What nobody needs is not drafted, yet its committed ids count; a newer ask takes an older one's place."""
    kind = Recording()

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        await peer.send(open_command(1, [1]), propose_command(1, 1))
        await asyncio.to_thread(kind.entered.wait, GIVE_UP_S)
        await peer.send(open_command(2, [2]), propose_command(2, 3, [5, 6], deadline_ms=1))
        await peer.send(
            open_command(3, [3]), propose_command(3, 1, round_index=1), propose_command(3, 1, round_index=2)
        )
        await eventually(lambda: len(drafter.engine._inbox) == 5)
        kind.release.set()
        assert (await peer.answer()).session_id == 1
        answer = await peer.answer()
        assert (answer.session_id, answer.proposed.round_index) == (3, 2)
        assert drafter.metric("moot_asks_dropped_total", reason="superseded") == 1
        assert drafter.metric("moot_asks_dropped_total", reason="expired") == 1
        assert await peer.ids(propose_command(2, 4, [7], 1)) == [[7]]

    # A clock that moves on by a second whenever it is read: the deadline of a millisecond is over at once.
    seconds = itertools.count()
    with_drafter(config(session_idle_limit_s=1e9), body, drafter=kind, clock=lambda: float(next(seconds)))


def test_a_defect_of_a_kind_ends_its_sessions_only() -> None:
    """The service goes on: the batch abstains, its sessions are to be opened again, later ones are served."""
    kind = Recording()
    kind.release.set()

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        kind.fail = True
        assert await peer.ids(open_command(1, [1]), propose_command(1, 1)) == []
        kind.fail = False
        assert (await peer.ask(propose_command(1, 1))).WhichOneof("answer") == "unknown_session"
        assert await peer.ids(open_command(2, [2]), propose_command(2, 1, num_tokens=2)) == [[2, 2]]
        assert drafter.metric("moot_asks_dropped_total", reason="failed") == 1
        assert kind.closed == [[1]]

    with_drafter(config(), body, drafter=kind)


def test_sessions_are_bounded_and_idle_ones_end() -> None:
    """One session more than allowed closes the least recently used one; one not used for its limit is closed."""

    async def bounded(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        for n in range(1, 4):
            await peer.ids(open_command(n, LOOP), propose_command(n, 10))
        await peer.ids(propose_command(1, 10))
        await peer.ids(open_command(4, LOOP), propose_command(4, 10))
        assert drafter.engine.num_sessions == 3
        assert (await peer.ask(propose_command(2, 10))).WhichOneof("answer") == "unknown_session"
        assert await peer.ids(propose_command(1, 10)) == [[3, 4, 1, 2]]

    async def idle(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        await peer.ids(open_command(1, LOOP), propose_command(1, 10))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert (await peer.ask(propose_command(1, 10))).WhichOneof("answer") == "unknown_session"

    with_drafter(config(max_num_seqs=3), bounded)
    with_drafter(config(session_idle_limit_s=0.05), idle)


def test_a_peer_that_floods_is_cut_off_alone() -> None:
    """The queue of commands is bounded: the stream that overfills it ends with an error, others go on."""
    kind = Recording()

    async def body(drafter: RunningDrafter) -> None:
        good, bad = drafter.peer(), drafter.peer()
        await good.send(open_command(1, [1]), propose_command(1, 1, num_tokens=1))
        await asyncio.to_thread(kind.entered.wait, GIVE_UP_S)
        await bad.send(*(open_command(n, [n]) for n in range(8)))
        await good.send(open_command(2, [1]), propose_command(2, 1, num_tokens=1), finish_command(2))
        await bad.send(*(open_command(n, [n]) for n in range(8, 16)))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(bad.call.read(), GIVE_UP_S)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        kind.release.set()
        assert (await good.answer()).session_id == 1

    with_drafter(config(max_queued_commands=10), body, drafter=kind)


def test_malformed_commands_end_the_stream_with_a_clear_status() -> None:
    """Candidates that do not fill rows are the peer's mistake, not something to be guessed."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        broken = token_pb2.TopCandidates(width=2, token_ids=[1, 2, 3])
        await peer.send(open_command(1, LOOP), propose_command(1, 11, [3], top_candidates=broken))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(peer.call.read(), GIVE_UP_S)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: drafter.engine.num_sessions == 0)

    with_drafter(config(), body)


def test_top_candidates_reach_the_kind() -> None:
    """Recycling learns from the rows that come with the committed ids; width asks for alternatives."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        rows = token_pb2.TopCandidates(width=2, token_ids=[2, 20, 1, 30])
        ask = propose_command(1, 3, [2, 1], 1, width=3, top_candidates=rows)
        assert await peer.ids(open_command(1, [1]), ask) == [[2], [20]]

    with_drafter(config("recycling"), body)


def test_prompts_above_grpcs_default_message_size_pass() -> None:
    """C27: a prompt of a million tokens (5 MiB) is one frame; what is larger than agreed ends with a clear status."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        prompt = [2**28 + n % 7 for n in range(1_100_000)]
        assert await peer.ids(open_command(1, prompt), propose_command(1, len(prompt))) == []
        loose = LinkConfig(max_message_bytes=64 * 1024 * 1024)
        async with open_channel(f"127.0.0.1:{drafter.server.port}", loose) as channel:
            other = Peer(channel)
            await other.send(open_command(2, prompt * 2))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(other.call.read(), GIVE_UP_S)
            assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await peer.ids(open_command(3, LOOP), propose_command(3, 10)) == [[3, 4, 1, 2]]

    with_drafter(config(max_message_bytes=8 * 1024 * 1024), body)


def test_describe_names_the_tokenizer(folder: Path) -> None:
    """C08: the router compares fingerprints before it uses a drafter; model and tables have the same one."""
    expected = tokenizer_fingerprint(load_tokenizer(folder))

    async def body(drafter: RunningDrafter) -> None:
        described = await drafter.peer().stub.Describe(pb.DescribeDrafterRequest(), timeout=GIVE_UP_S)
        assert described.kind == drafter.config.kind
        assert described.model.tokenizer_fingerprint == expected
        assert described.model.vocab_size == 259
        assert described.model.context_limit == (128 if described.kind == "neural" else 131_072)
        assert described.family == ("alike" if described.kind == "suffix" else "neural")

    with_drafter(neural_config(folder), body)
    with_drafter(config("suffix", ("family=alike",), tokenizer=str(folder)), body)


def test_wrong_tokenizer_or_options_are_refused_at_start(folder: Path, tmp_path: Path) -> None:
    """A draft model with another tokenizer than --tokenizer never starts; mistyped options are named."""
    other = load_tokenizer(folder)
    other.add_tokens(["extra"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="has tokenizer"):
        make_drafter_kind(neural_config(folder, tokenizer=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="unknown option of drafter kind suffix: nope"):
        make_drafter_kind(config("suffix", (*VOCAB, "nope=1")))
    with pytest.raises(ConfigError, match="needs option vocab_size"):
        make_drafter_kind(config("suffix", ()))
    with pytest.raises(ConfigError, match="name=value"):
        config("suffix", ("vocab_size",))


def test_neural_drafts_for_many_streams_as_alone(folder: Path) -> None:
    """Batched in one service, each session's proposals are those of the model alone, round after round (C04)."""
    prompts = {n: [n * 7 % 250, n, 3, n + 1] for n in range(1, 7)}
    alone = create("neural", make_options(folder))

    async def body(drafter: RunningDrafter) -> None:
        async def talk(n: int) -> None:
            peer = drafter.peer()
            prefix = list(prompts[n])
            held = alone_sessions[n]
            got = await peer.ids(open_command(n, prefix), propose_command(n, len(prefix), (), n))
            for round_index in range(1, 4):
                (chain,) = alone.propose([Ask(held, n)])[0]
                assert got == [list(chain.token_ids)]
                committed = [*chain.token_ids[: n // 2], round_index]
                alone.extend(held, committed)
                prefix += committed
                got = await peer.ids(propose_command(n, len(prefix), committed, n, round_index=round_index))
            peer.call.cancel()

        alone_sessions = {n: alone.open(prompt, GREEDY) for n, prompt in prompts.items()}
        async with asyncio.TaskGroup() as group:
            for n in prompts:
                group.create_task(talk(n))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert drafter.drafter.kv_used_tokens == 0  # type: ignore[attr-defined]

    with_drafter(neural_config(folder), body)


def make_options(folder: Path) -> dict[str, object]:
    return {"model": folder, "dtype": "float64", "device": "cpu", "batch_invariant": True, "num_threads": 1}


def test_draft_ahead_has_the_next_proposal_ready(folder: Path) -> None:
    """While idle the drafter goes on by the target's token and a whole proposal, and no further; a prefix on that path
    is answered from it. Every token drafted ahead ends as used or as dropped."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        prompt = [5, 6, 7]
        (first,) = await peer.ids(open_command(1, prompt), propose_command(1, 3, (), 3))
        (session,) = list(drafter.engine._table)
        await eventually(lambda: len(session.path) == 3 + 1 + 3)
        path = list(session.path.chain.token_ids)
        assert path[:3] == first
        drafted = drafter.metric("moot_draft_seconds_count")
        assert await peer.ids(propose_command(1, 7, path[:4], 3)) == [path[4:7]]
        assert drafter.metric("moot_draft_ahead_answers_total") == 1
        assert drafter.metric("moot_draft_ahead_used_tokens_total") == 4
        assert drafter.metric("moot_draft_seconds_count") == drafted
        await eventually(lambda: len(session.path) == 3 + 1 + 3)
        # Off the path: drafted anew, from the true prefix.
        wrong = (session.path.chain.token_ids[0] + 1) % 250
        fresh = create("neural", make_options(folder))
        (expected,) = fresh.propose([Ask(fresh.open([*prompt, *path[:4], wrong], GREEDY), 3)])[0]
        assert await peer.ids(propose_command(1, 8, [wrong], 3)) == [list(expected.token_ids)]
        assert drafter.metric("moot_draft_ahead_answers_total") == 1
        assert drafter.metric("moot_draft_ahead_dropped_tokens_total") == 4
        await peer.send(finish_command(1))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        ended = ("moot_draft_ahead_used_tokens_total", "moot_draft_ahead_dropped_tokens_total")
        assert drafter.metric("moot_draft_ahead_tokens_total") == sum(map(drafter.metric, ended))

    with_drafter(neural_config(folder, draft_ahead="on"), body)


def test_without_draft_ahead_an_idle_drafter_drafts_nothing(folder: Path) -> None:
    """Where verifier and drafter share cores, idle work would slow the verifier down."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        (first,) = await peer.ids(open_command(1, [5, 6, 7]), propose_command(1, 3, (), 3))
        await peer.ids(open_command(2, [8]), propose_command(2, 1, (), 3))
        (session,) = [s for s in drafter.engine._table if s.session_id == 1]
        assert len(session.path) == len(session.held.ahead) == len(first) == 3
        assert drafter.metric("moot_draft_ahead_tokens_total") == 0

    with_drafter(neural_config(folder, draft_ahead="off"), body)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def switch(text: str) -> None:
        monkeypatch.setattr(moot.runtime.faults, "_active", moot.runtime.faults.parse_faults(text))

    return switch


def test_faulty_drafters_talk_nonsense_on_request(faults: Callable[[str], None]) -> None:
    """C20: the fault point produces what no drafter may answer, for the named request only."""

    async def body(drafter: RunningDrafter) -> None:
        peer = drafter.peer()
        forms = {"range": [[57, 57]], "long": [[0] * 7], "empty": [[]], "confidences": [[0, 0]]}
        for number, (form, expected) in enumerate(forms.items(), start=1):
            faults(f"drafter.propose=garbage:{form}@sick")
            opening = open_command(number, LOOP, request="sick")
            answer = await peer.ask(opening, propose_command(number, 10, (), 2))
            assert [list(p.token_ids) for p in answer.proposed.proposals] == expected
            if form == "confidences":
                assert len(answer.proposed.proposals[0].confidences) == 1
        faults("drafter.propose=lie@sick")
        (lie,) = await peer.ids(propose_command(4, 10, (), 8))
        assert lie != [3, 4, 1, 2, 3, 4, 1, 2]
        assert all(token < 50 for token in lie)
        assert await peer.ids(open_command(9, LOOP, request="well"), propose_command(9, 10)) == [[3, 4, 1, 2]]

    with_drafter(config(), body)


def test_a_frozen_drafter_still_stops(faults: Callable[[str], None]) -> None:
    """Frozen means silent, not immortal: the stall shows in its liveness, and stopping it does not hang."""

    async def body(drafter: RunningDrafter) -> None:
        faults("drafter.propose=freeze")
        peer = drafter.peer()
        await peer.send(open_command(1, LOOP), propose_command(1, 10))
        await eventually(lambda: not drafter.engine.is_alive)
        # Commands are taken, nothing is answered.
        await peer.send(propose_command(1, 10))
        await asyncio.to_thread(drafter.engine.stop)
        assert not drafter.engine.is_running

    with_drafter(config(stall_limit_s=0.05), body)


def test_drain_tells_every_peer_and_waits_for_them() -> None:
    """A drafter that goes away says so; its peers move and close, and then nothing is left."""

    async def body(drafter: RunningDrafter) -> None:
        peers = [drafter.peer(), drafter.peer()]
        for peer in peers:
            await peer.ids(open_command(1, LOOP), propose_command(1, 10))
        drained = asyncio.create_task(drafter.servicer.drain(3.0))
        for peer in peers:
            assert (await peer.answer()).drain.grace_ms == 3000
            assert not drained.done()
            assert await peer.ids(propose_command(1, 10)) == [[3, 4, 1, 2]]
        late = drafter.peer()
        assert (await late.answer()).drain.grace_ms == 3000
        for peer in (*peers, late):
            await peer.call.done_writing()
        await asyncio.wait_for(drained, GIVE_UP_S)
        await eventually(lambda: drafter.engine.num_sessions == 0)

    with_drafter(config(), body)
