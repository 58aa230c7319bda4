"""A drafter over real gRPC on loopback: sessions, batches, ends, limits and faults."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from moot.core.errors import ConfigError
from moot.drafters.registry import REQUEST_KINDS
from moot.rpc import convert
from moot.testing.tiny_model import make_tiny_model
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import token_pb2
from services.drafter.serve import make_drafter_kind
from tests.services.drafter.drafter_driver import (
    Watched,
    finish_command,
    neural,
    open_command,
    propose_command,
    running,
    settings,
)
from tests.waiting import GIVE_UP_S, eventually

LOOP = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]


async def test_a_session_from_open_to_finish() -> None:
    """Answers repeat session, round and base length; proposals carry the drafter's name; finish frees the session."""
    async with running(settings(drafter_id="lookup-a")) as (drafter, peer):
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
        assert await peer.said(propose_command(7, 13)) == "unknown_session"


async def test_what_does_not_fit_is_answered_with_unknown_session() -> None:
    """A session that was never opened, or whose length differs, is to be opened again; nothing is guessed (C06)."""
    async with running(settings()) as (drafter, peer):
        unknown = await peer.ask(propose_command(3, 5, round_index=9))
        assert unknown.session_id == 3
        assert unknown.unknown_session.round_index == 9
        for base_length in (9, 11, 12):
            answer = await peer.ask(open_command(4, LOOP), propose_command(4, base_length, round_index=2))
            assert answer.WhichOneof("answer") == "unknown_session"
            assert answer.unknown_session.round_index == 2
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert await peer.ids(open_command(5, LOOP), propose_command(5, 10)) == [[3, 4, 1, 2]]


async def test_abstaining_is_an_answer_without_proposals() -> None:
    """A drafter with nothing to say answers at once, so that nobody waits for it."""
    async with running(settings()) as (_, peer):
        assert await peer.ids(open_command(1, [1, 2, 3]), propose_command(1, 3)) == []
        assert await peer.ids(open_command(2, []), propose_command(2, 0)) == []
        assert await peer.ids(open_command(3, LOOP), propose_command(3, 10, num_tokens=0)) == []


async def test_sessions_of_two_streams_never_meet() -> None:
    """Session ids are a stream's own; the end of a stream without finish frees its sessions and no other."""
    async with running(settings()) as (drafter, one):
        two = drafter.peer()
        assert await one.ids(open_command(1, LOOP), propose_command(1, 10)) == [[3, 4, 1, 2]]
        assert await two.ids(open_command(1, [9, 8, 9]), propose_command(1, 3, num_tokens=2)) == [[8, 9]]
        one.call.cancel()
        await eventually(lambda: drafter.engine.num_sessions == 1)
        assert await two.ids(propose_command(1, 4, [8], 1)) == [[9]]
        await two.call.done_writing()
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert drafter.metric("moot_num_sessions") == 0


async def test_what_waits_is_drafted_for_together() -> None:
    """While a batch is drafted, asks gather; the next batch takes them all, up to its limit."""
    kind = Watched()
    async with running(settings(max_batch=5), kind) as (drafter, peer):
        await peer.send(open_command(1, [1]), propose_command(1, 1))
        await eventually(lambda: kind.calls)
        for n in range(2, 9):
            await peer.send(open_command(n, [n]), propose_command(n, 1))
        await eventually(lambda: len(drafter.engine._inbox) == 14)
        kind.go.release(9)
        answers = [await peer.answer() for _ in range(8)]
        assert {a.session_id: a.proposed.proposals[0].token_ids[0] for a in answers} == {n: n for n in range(1, 9)}
        assert [len(asks) for asks in kind.calls] == [1, 5, 2]


class Warming(Watched):
    """A kind that prepares a session in three pieces, each of which waits until it is let go."""

    def __init__(self) -> None:
        super().__init__(num_free=9)
        self.pieces = threading.Semaphore(0)
        self.warmed_at: list[int] = []
        """For each piece, how many proposals there had been."""

    def warm(self, session: list[int]) -> bool:
        self.warmed_at.append(len(self.calls))
        assert self.pieces.acquire(timeout=GIVE_UP_S)
        return len(self.warmed_at) < 3


async def test_an_ask_does_not_wait_until_a_new_session_is_prepared() -> None:
    """Preparing a session goes on piece by piece while nobody asks: an ask waits for one piece at most."""
    kind = Warming()
    async with running(settings(), kind) as (drafter, peer):
        await peer.send(open_command(1, [1]))
        await eventually(lambda: kind.warmed_at)
        await peer.send(propose_command(1, 1))
        await eventually(lambda: drafter.engine._inbox)
        kind.pieces.release()
        assert (await peer.answer()).proposed.proposals
        kind.pieces.release(2)
        await eventually(lambda: drafter.session().is_warm)
        assert kind.warmed_at == [0, 1, 1]


async def test_expired_and_superseded_asks_are_dropped() -> None:
    """What nobody needs is not drafted, yet its committed ids count; a newer ask takes an older one's place."""
    kind = Watched()
    # A clock that moves on by a second whenever it is read: the deadline of a millisecond is over at once.
    seconds = itertools.count(0.0)
    async with running(settings(session_idle_limit_s=1e9), kind, seconds.__next__) as (drafter, peer):
        await peer.send(open_command(1, [1]), propose_command(1, 1))
        await eventually(lambda: kind.calls)
        await peer.send(open_command(2, [2]), propose_command(2, 3, [5, 6], deadline_ms=1))
        await peer.send(
            open_command(3, [3]), propose_command(3, 1, round_index=1), propose_command(3, 1, round_index=2)
        )
        await eventually(lambda: len(drafter.engine._inbox) == 5)
        kind.go.release(9)
        assert (await peer.answer()).session_id == 1
        answer = await peer.answer()
        assert (answer.session_id, answer.proposed.round_index) == (3, 2)
        assert drafter.metric("moot_asks_dropped_total", reason="superseded") == 1
        assert drafter.metric("moot_asks_dropped_total", reason="expired") == 1
        assert await peer.ids(propose_command(2, 4, [7], 1)) == [[7]]


async def test_a_defect_of_a_kind_ends_its_sessions_only() -> None:
    """The service goes on: the batch abstains, its sessions are to be opened again, later ones are served."""
    kind = Watched(num_free=9)
    async with running(settings(), kind) as (drafter, peer):
        kind.fails = True
        assert await peer.ids(open_command(1, [1]), propose_command(1, 1)) == []
        kind.fails = False
        assert await peer.said(propose_command(1, 1)) == "unknown_session"
        assert await peer.ids(open_command(2, [2]), propose_command(2, 1, num_tokens=2)) == [[2, 2]]
        assert drafter.metric("moot_asks_dropped_total", reason="failed") == 1
        assert kind.closed == [[1]]


async def test_sessions_are_bounded_and_idle_ones_end() -> None:
    """One session more than allowed closes the least recently used one; one not used for its limit is closed."""
    async with running(settings(max_num_seqs=3)) as (drafter, peer):
        for n in range(1, 4):
            await peer.ids(open_command(n, LOOP), propose_command(n, 10))
        await peer.ids(propose_command(1, 10))
        await peer.ids(open_command(4, LOOP), propose_command(4, 10))
        assert drafter.engine.num_sessions == 3
        assert await peer.said(propose_command(2, 10)) == "unknown_session"
        assert await peer.ids(propose_command(1, 10)) == [[3, 4, 1, 2]]
    async with running(settings(session_idle_limit_s=0.05)) as (drafter, peer):
        await peer.ids(open_command(1, LOOP), propose_command(1, 10))
        await eventually(lambda: drafter.engine.num_sessions == 0)
        assert await peer.said(propose_command(1, 10)) == "unknown_session"


async def test_a_peer_that_floods_is_cut_off_alone() -> None:
    """The queue of commands is bounded: the stream that overfills it ends with an error, others go on."""
    kind = Watched()
    async with running(settings(max_queued_commands=10), kind) as (drafter, good):
        bad = drafter.peer()
        await good.send(open_command(1, [1]), propose_command(1, 1, num_tokens=1))
        await eventually(lambda: kind.calls)
        await bad.send(*(open_command(n, [n]) for n in range(8)))
        await good.send(open_command(2, [1]), propose_command(2, 1, num_tokens=1), finish_command(2))
        await bad.send(*(open_command(n, [n]) for n in range(8, 16)))
        assert await bad.status() is grpc.StatusCode.UNAVAILABLE
        kind.go.release(9)
        assert (await good.answer()).session_id == 1


async def test_malformed_commands_end_the_stream_with_a_clear_status() -> None:
    """Candidates that do not fill rows are the peer's mistake, not something to be guessed."""
    async with running(settings()) as (drafter, peer):
        broken = token_pb2.TopCandidates(width=2, token_ids=[1, 2, 3])
        await peer.send(open_command(1, LOOP), propose_command(1, 11, [3], top_candidates=broken))
        assert await peer.status() is grpc.StatusCode.INVALID_ARGUMENT
        await eventually(lambda: drafter.engine.num_sessions == 0)


async def test_top_candidates_reach_the_kind() -> None:
    """Recycling learns from the rows that come with the committed ids; width asks for alternatives."""
    async with running(settings("recycling")) as (_, peer):
        rows = token_pb2.TopCandidates(width=2, token_ids=[2, 20, 1, 30])
        ask = propose_command(1, 3, [2, 1], 1, width=3, top_candidates=rows)
        assert await peer.ids(open_command(1, [1]), ask) == [[2], [20]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model", context=128)


@pytest.mark.parametrize(("kind", "family", "context_limit"), [("neural", "neural", 128), ("suffix", "alike", 131_072)])
async def test_describe_names_the_tokenizer(folder: Path, kind: str, family: str, context_limit: int) -> None:
    """C08: the router compares fingerprints before it uses a drafter; model and tables have the same one."""
    config = neural(folder) if kind == "neural" else settings(kind, ("family=alike",), tokenizer=str(folder))
    async with running(config) as (_, peer):
        described = await peer.stub.Describe(pb.DescribeDrafterRequest(), timeout=GIVE_UP_S)
        info = convert.model_info_from_pb(described.model)
        assert (described.kind, described.family) == (kind, family)
        assert (info.vocab_size, info.context_limit) == (259, context_limit)
        assert info.tokenizer_fingerprint == tokenizer_fingerprint(load_tokenizer(folder))


def test_wrong_tokenizer_or_options_are_refused_at_start(folder: Path, tmp_path: Path) -> None:
    """A draft model with another tokenizer than --tokenizer never starts; mistyped options are named."""
    other = load_tokenizer(folder)
    other.add_tokens(["extra"])
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="has tokenizer"):
        make_drafter_kind(neural(folder, tokenizer=str(tmp_path / "other")))
    with pytest.raises(ConfigError, match="unknown option of drafter kind suffix: nope"):
        make_drafter_kind(settings("suffix", ("vocab_size=50", "nope=1")))
    with pytest.raises(ConfigError, match="needs option vocab_size"):
        make_drafter_kind(settings("suffix", ()))
    with pytest.raises(ConfigError, match="name=value"):
        settings("suffix", ("vocab_size",))
    # A kind that lives from what a request brings would abstain for ever: what it needs never leaves the router.
    for kind in REQUEST_KINDS:
        with pytest.raises(ConfigError, match="the router runs it itself"):
            make_drafter_kind(settings(kind))


async def test_faulty_drafters_talk_nonsense_on_request(set_faults: Callable[[str], None]) -> None:
    """C20: the fault point produces what no drafter may answer, for the named request only."""
    async with running(settings()) as (_, peer):
        forms = {"range": [[57, 57]], "long": [[0] * 7], "empty": [[]], "confidences": [[0, 0]]}
        for number, (form, expected) in enumerate(forms.items(), start=1):
            set_faults(f"drafter.propose=garbage:{form}@sick")
            opening = open_command(number, LOOP, request="sick")
            answer = await peer.ask(opening, propose_command(number, 10, (), 2))
            assert [list(p.token_ids) for p in answer.proposed.proposals] == expected
            if form == "confidences":
                assert len(answer.proposed.proposals[0].confidences) == 1
        set_faults("drafter.propose=lie@sick")
        (lie,) = await peer.ids(propose_command(4, 10, (), 8))
        assert lie != [3, 4, 1, 2, 3, 4, 1, 2]
        assert all(token < 50 for token in lie)
        assert await peer.ids(open_command(9, LOOP, request="well"), propose_command(9, 10)) == [[3, 4, 1, 2]]


async def test_a_frozen_drafter_still_stops(set_faults: Callable[[str], None]) -> None:
    """Frozen means silent, not immortal: the stall shows in its liveness, and stopping it does not hang."""
    async with running(settings(stall_limit_s=0.05)) as (drafter, peer):
        set_faults("drafter.propose=freeze")
        await peer.send(open_command(1, LOOP), propose_command(1, 10))
        await eventually(lambda: not drafter.engine.is_alive)
        # Commands are taken, nothing is answered.
        await peer.send(propose_command(1, 10))
        await asyncio.to_thread(drafter.engine.stop)
        assert not drafter.engine.is_running


async def test_drain_tells_every_peer_and_waits_for_them() -> None:
    """A drafter that goes away says so; its peers move and close, and then nothing is left."""
    async with running(settings()) as (drafter, first):
        peers = [first, drafter.peer()]
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
