"""A drafter without a model that speaks the real wire: it knows the true text and spoils it as the test tells it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from copy import deepcopy
from enum import Enum
from functools import partial
from typing import Any

import grpc.aio

from moot.core.types import ModelInfo
from moot.rpc import convert
from moot.testing.in_process_server import ScriptedPeer, ScriptedPeerStream
from moot.testing.scripted_sessions import ScriptedSession
from moot.testing.scripted_text import ScriptedText
from moot.v1 import drafter_service_pb2 as pb
from moot.v1 import drafter_service_pb2_grpc, token_pb2


class Manner(Enum):
    """The manner in which one question is answered."""

    TRUE = "true"
    """The true continuation, spoilt at a drawn place with the drafter's own chance."""
    WRONG = "wrong"
    """Well-formed, and wrong from the first token on."""
    ABSTAIN = "abstain"
    SILENT = "silent"
    LATE = "late"
    """After `late_s` seconds."""
    DOUBLE = "double"
    STALE = "stale"
    """An answer to another round first, then the right one."""
    UNKNOWN = "unknown"
    """The session has been forgotten."""
    EMPTY = "empty"
    TOO_LONG = "too_long"
    OUT_OF_RANGE = "out_of_range"
    BAD_CONFIDENCES = "bad_confidences"


_Stream = ScriptedPeerStream[ScriptedSession, pb.DraftAnswer]


class ScriptedDrafter(
    ScriptedPeer[ScriptedSession, pb.DraftCommand, pb.DraftAnswer], drafter_service_pb2_grpc.DrafterServiceServicer
):
    """A drafter that answers from the true text. `manner` is called once per question; `spoil` is the chance that a
    TRUE answer is spoilt at a drawn place.

    Public attributes may be changed while it runs.
    """

    def __init__(
        self,
        text: ScriptedText | None = None,
        *,
        seed: int = 0,
        spoil: float = 0.5,
        manner: Callable[[], Manner] = lambda: Manner.TRUE,
        tokenizer_fingerprint: str = "scripted",
        context_limit: int = 8192,
        kind: str = "scripted",
        family: str = "",
    ) -> None:
        super().__init__(partial(drafter_service_pb2_grpc.add_DrafterServiceServicer_to_server, self))
        self.text = text or ScriptedText()
        self.spoil = spoil
        self.manner = manner
        self.late_s = 0.5
        self.delay_s = 0.0
        self.kind = kind
        self.family = family
        self.info = ModelInfo("scripted", "1", tokenizer_fingerprint, self.text.vocab_size, context_limit)
        self.longest_prefix_asked = 0
        self.num_candidate_rows = 0
        """Rows of the target's likely ids that came with the questions."""
        self._random = random.Random(seed)
        self._is_draining = False

    async def start(self) -> None:
        self._is_draining = False
        await super().start()

    def drain(self) -> None:
        """Tell every peer to go elsewhere, also those that still come."""
        self._is_draining = True
        for stream in self._streams:
            self._say_drain(stream)

    @staticmethod
    def _say_drain(stream: _Stream) -> None:
        stream.answers.put(pb.DraftAnswer(drain=pb.DrafterDrain(grace_ms=1000)))

    def take(self, stream: _Stream, command: pb.DraftCommand) -> None:
        kind = command.WhichOneof("command")
        self.counts[str(kind)] += 1
        if kind == "open":
            opening = command.open
            prefix = [*opening.prompt_token_ids, *opening.output_token_ids]
            params = convert.sampling_from_pb(opening.sampling)
            stream.sessions[command.session_id] = ScriptedSession(prefix, len(opening.prompt_token_ids), params)
        elif kind == "propose":
            self._propose(stream, command)
        else:
            stream.sessions.pop(command.session_id, None)

    def _propose(self, stream: _Stream, command: pb.DraftCommand) -> None:
        manner, question = self.manner(), command.propose
        if manner is Manner.UNKNOWN:
            stream.sessions.pop(command.session_id, None)
        session = stream.sessions.get(command.session_id)
        answer = pb.DraftAnswer(session_id=command.session_id)
        if session is None:
            answer.unknown_session.round_index = question.round_index
            stream.answers.put(answer)
            return
        session.prefix.extend(question.committed_token_ids)
        self.num_candidate_rows += len(convert.top_candidates_from_pb(question.top_candidates))
        self.longest_prefix_asked = max(self.longest_prefix_asked, len(session.prefix))
        answer.proposed.round_index = question.round_index
        answer.proposed.base_length = question.base_length
        if question.base_length != len(session.prefix):
            raise AssertionError("the router's base_length is not what it told this drafter")
        if manner is not Manner.ABSTAIN:
            answer.proposed.proposals.append(self._proposal(session, question.num_speculative_tokens, manner))
        if manner is Manner.SILENT:
            return
        if manner is Manner.STALE:
            stale = deepcopy(answer)
            stale.proposed.round_index += 1
            stream.answers.put(stale)
        delay = self.late_s if manner is Manner.LATE else self.delay_s
        copies = 2 if manner is Manner.DOUBLE else 1
        for _ in range(copies):
            if delay:
                asyncio.get_running_loop().call_later(delay, stream.answers.put, answer)
            else:
                stream.answers.put(answer)

    def _proposal(self, session: ScriptedSession, count: int, manner: Manner) -> token_pb2.Proposal:
        size = self.text.vocab_size
        ids = self.text.continuation(session.prefix, session.num_output, session.params, count)
        if manner is Manner.WRONG:
            ids = [(token + 1) % size for token in ids]
        elif self._random.random() < self.spoil:
            place = self._random.randrange(count)
            ids[place:] = [(ids[place] + 1) % size, *ids[place + 1 :]]
        confidences = bytes([200] * len(ids))
        if manner is Manner.EMPTY:
            ids, confidences = [], b""
        elif manner is Manner.TOO_LONG:
            ids, confidences = ids * 2, confidences * 2
        elif manner is Manner.OUT_OF_RANGE:
            ids[-1] = size + 5
        elif manner is Manner.BAD_CONFIDENCES:
            confidences += b"\x01"
        return token_pb2.Proposal(token_ids=ids, confidences=confidences)

    def enter(self, stream: _Stream) -> None:
        super().enter(stream)
        if self._is_draining:
            self._say_drain(stream)

    async def Describe(
        self, request: pb.DescribeDrafterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeDrafterResponse:
        return pb.DescribeDrafterResponse(kind=self.kind, family=self.family, model=convert.model_info_to_pb(self.info))

    def Draft(
        self, request_iterator: AsyncIterator[pb.DraftRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.DraftResponse]:
        return self.serve(request_iterator, lambda answers: pb.DraftResponse(answers=answers))
