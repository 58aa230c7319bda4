"""What a drafter tells ahead: it spares the question's way and back, and neither a wrong nor a broken one costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from moot.core.options import make_config
from moot.rpc.grpc_server import GrpcServer
from moot.rpc.link import LinkConfig
from moot.runtime.metrics import Metrics
from moot.testing import ScriptedDrafter
from moot.testing.scripted_kind import ScriptedKind
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import token_pb2
from moot.v1.drafter_service_pb2_grpc import add_DrafterServiceServicer_to_server
from services.drafter.config import DrafterConfig
from services.drafter.drafter_engine import DrafterEngine
from services.drafter.servicer import DrafterServicer
from services.router.peers.links import PeerState
from services.router.peers.outlier_ejection import EjectionPolicy
from tests.services.router.generation.rounds_rig import TEXT, request, rig
from tests.waiting import eventually


class TellingDrafter(ScriptedDrafter):
    """Tells a path ahead with every answer, and answers nothing that the router has taken out of one.

    `tell`: what becomes of the path: "true"; "wrong" from a drawn place on; "stale": of another round; "long";
    "vocabulary": with an id that there is not.
    """

    def __init__(self, tell: str, **fields: Any) -> None:
        super().__init__(TEXT, **fields)
        self.tell = tell
        self.num_answered_ahead = 0
        self.num_answered = 0

    def _propose(self, stream: Any, command: pb.DraftCommand) -> None:
        question = command.propose
        assert question.takes_ahead
        if question.is_answered:
            self.num_answered_ahead += 1
            session = stream.sessions[command.session_id]
            session.prefix.extend(question.committed_token_ids)
            assert question.base_length == len(session.prefix)
        else:
            self.num_answered += 1
            super()._propose(stream, command)
            session = stream.sessions[command.session_id]
        stream.answers.put(pb.DraftAnswer(session_id=command.session_id, ahead=self._ahead(session, question)))

    def _ahead(self, session: Any, question: pb.Propose) -> pb.Ahead:
        num_output = len(session.prefix) - session.num_prompt
        count = 2 * question.num_speculative_tokens + 1
        ids = self.text.continuation(
            session.prefix, num_output, session.params, count * (4 if self.tell == "long" else 1)
        )
        if self.tell == "wrong":
            place = self._random.randrange(count)
            ids[place:] = [(token + 1) % self.text.vocab_size for token in ids[place:]]
        if self.tell == "vocabulary":
            ids[-1] = self.text.vocab_size + 3
        path = token_pb2.Proposal(token_ids=ids, confidences=bytes([200] * len(ids)))
        round_index = question.round_index + (self.tell == "stale")
        return pb.Ahead(round_index=round_index, base_length=question.base_length, path=path)


async def test_a_text_that_goes_along_what_was_told_asks_nobody_and_waits_for_nobody() -> None:
    """Only the first question is answered, and every round accepts its whole draft."""
    drafter = TellingDrafter("true", spoil=0.0)
    async with rig(drafters={"one": [drafter]}, num_speculative_tokens=3) as router:
        router.verifiers[0].step_s = 0.03  # what is told for the next round is here before the round is over
        outcome = await router.check(request(max_tokens=80))
        assert drafter.num_answered <= 2  # the last question may ask for less than a whole proposal
        assert drafter.num_answered_ahead >= 15
        assert outcome.metrics.num_accepted_tokens == outcome.metrics.num_draft_tokens
        assert outcome.metrics.drafters["one"].num_proposed_tokens >= 3 * 15
        assert router.total("proposals_dropped_total") == 0


@pytest.mark.parametrize("spoil", [0.0, 0.6])
async def test_what_was_told_wrong_is_not_used_and_moves_no_token(spoil: float) -> None:
    """Where the text leaves the path, the drafter is asked as ever; where it does not, its word is a hint as ever."""
    drafter = TellingDrafter("wrong", spoil=spoil)
    other = TellingDrafter("true", spoil=spoil, seed=1)
    async with rig(drafters={"one": [drafter], "two": [other]}, num_speculative_tokens=3) as router:
        for temperature in (0.0, 1.0):
            asked = request(max_tokens=80, temperature=temperature, seed=random.Random(4).randrange(1 << 30))
            await router.check(asked)
        assert drafter.num_answered > 5
        assert drafter.num_answered_ahead > 0
        (link,) = router.pools["one"].links.values()
        assert link.state is PeerState.READY


@pytest.mark.parametrize(
    ("tell", "reason", "ejected"),
    [("stale", "stale", False), ("long", "malformed", True), ("vocabulary", "vocabulary", True)],
)
async def test_what_may_not_be_told_is_dropped_and_counted(tell: str, reason: str, ejected: bool) -> None:
    """As with an answer: what fits no question is dropped, what no drafter may say is a failure against it."""
    drafter = TellingDrafter(tell, spoil=0.0)
    failures = EjectionPolicy(eject_s=600)
    async with rig(drafters={"one": [drafter]}, failures=failures, num_speculative_tokens=3) as router:
        await router.check(request(max_tokens=80))
        assert router.counter("proposals_dropped_total", drafter="one", reason=reason) >= (3 if ejected else 10)
        (link,) = router.pools["one"].links.values()
        assert (link.state is PeerState.EJECTED) is ejected


@asynccontextmanager
async def drafter_at_work(acceptance: float) -> AsyncIterator[tuple[str, Metrics]]:
    """A real drafter around a scripted kind, and its address."""
    metrics, config = Metrics(), make_config(DrafterConfig, kind="scripted", draft_ahead="on")
    engine = DrafterEngine(ScriptedKind(TEXT, acceptance=acceptance), config, metrics, TEXT.vocab_size)
    info = token_pb2.ModelInfo(vocab_size=TEXT.vocab_size, context_limit=8192)
    server = GrpcServer(LinkConfig(), ["moot.v1.DrafterService"])
    servicer = DrafterServicer(engine, pb.DescribeDrafterResponse(kind="scripted", model=info), "real", 1000, 1 << 20)
    add_DrafterServiceServicer_to_server(servicer, server.server)
    engine.start()
    try:
        await server.start("127.0.0.1", 0)
        yield f"127.0.0.1:{server.port}", metrics
    finally:
        await server.stop(0)
        await asyncio.to_thread(engine.stop)


@pytest.mark.parametrize("acceptance", [1.0, 0.8])
async def test_a_real_drafter_and_a_real_router_stay_in_step(acceptance: float) -> None:
    """Several requests at once: the texts are the target's, and what was told ahead is used."""
    async with (
        drafter_at_work(acceptance) as (address, metrics),
        rig(drafters={"real": []}, wait_for_drafters=False, num_speculative_tokens=3) as router,
    ):
        (verifier,) = router.verifiers
        await router.pools["real"].set_addresses([address])
        await eventually(lambda: router.pools["real"].is_available)
        # Until steps are long enough to draft ahead in.
        for step_s in (0.004, 0.016, 0.064):
            verifier.step_s = step_s
            asked = [request(bytes([65 + index]) * 9, max_tokens=60, temperature=0.7, seed=index) for index in range(4)]
            outcomes = await asyncio.gather(*map(router.generate, asked))
            for one, outcome in zip(asked, outcomes, strict=True):
                assert outcome.token_ids == router.plain(one)[0]
            if answers := metrics.registry.get_sample_value("moot_draft_ahead_answers_total"):
                break
        assert answers
        for reason in ("malformed", "duplicate", "unknown_session"):
            assert router.counter("proposals_dropped_total", drafter="real", reason=reason) == 0
