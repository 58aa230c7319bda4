"""A verifier without a model that speaks the real wire, and can be told to fail in every way a real one can."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import grpc.aio

from moot.core.errors import InvalidRequest, MootError, NoCapacity, RequestPoisoned, UnknownSession
from moot.core.types import Draft, ModelInfo, Proposal, Verification
from moot.rpc import convert
from moot.testing.in_process_server import ScriptedPeer, ScriptedPeerStream
from moot.testing.scripted_sessions import VerifiedSession
from moot.testing.scripted_text import ScriptedText
from moot.v1 import verifier_service_pb2 as pb
from moot.v1 import verifier_service_pb2_grpc

AttachedRule = Callable[[VerifiedSession, int, int], Sequence[tuple[int, ...]]]
"""An attached drafter as a function: from session, tokens and width wished to the chains that it proposes."""

_Stream = ScriptedPeerStream[VerifiedSession, pb.VerifyAnswer]


class ScriptedVerifier(
    ScriptedPeer[VerifiedSession, pb.VerifyCommand, pb.VerifyAnswer], verifier_service_pb2_grpc.VerifierServiceServicer
):
    """Serves `text` on loopback. Public attributes may be changed while it runs.

    `step_s` and `step_per_token_s`: what a step costs, in seconds. `lose_on`: request ids whose next step takes the
    whole verifier down; `poison`, `refuse_capacity`: request ids that fail by themselves at their next command;
    `forget`: those whose session is gone at their next verify. `double_answers`: every answer is sent twice;
    `stale_answers`: before every answer one of another round and one of another session. `attached`: attached drafters,
    by id; Describe tells them.
    """

    def __init__(
        self,
        text: ScriptedText | None = None,
        *,
        tokenizer_fingerprint: str = "scripted",
        model: str = "scripted",
        numerics_fingerprint: str = "scripted-numerics",
        context_limit: int = 8192,
        max_num_seqs: int = 32,
        max_draft_tokens: int = 64,
    ) -> None:
        super().__init__(partial(verifier_service_pb2_grpc.add_VerifierServiceServicer_to_server, self))
        self.text = text or ScriptedText()
        self.info = ModelInfo(
            model, "1", tokenizer_fingerprint, self.text.vocab_size, context_limit, self.text.end_token_ids
        )
        self.numerics_fingerprint = numerics_fingerprint
        self.max_num_seqs = max_num_seqs
        self.max_draft_tokens = max_draft_tokens
        self.step_s = 0.0
        self.step_per_token_s = 0.0
        self.lose_on: set[str] = set()
        self.poison: set[str] = set()
        self.refuse_capacity: set[str] = set()
        self.forget: set[str] = set()
        self.double_answers = False
        self.stale_answers = False
        self.answer_heartbeats = True
        self.attached: dict[str, AttachedRule] = {}
        self.wishes: list[int] = []
        """Tokens wished of attached drafters, command by command."""
        self.cache_salts: set[str] = set()
        self.largest_batch = 0
        self.largest_queue = 0
        self._queue: deque[tuple[_Stream, pb.VerifyCommand]] = deque()
        self._work = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._step_counter = 0
        self._computing: list[tuple[_Stream, pb.VerifyCommand]] = []
        self._over: set[tuple[_Stream, int]] = set()
        """Sessions that have ended before their opening was computed: it is answered, and opens nothing."""
        self._engine: asyncio.Task[None] | None = None
        self._losing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start serving; also after `kill`: again on the same port, with nothing in memory."""
        await super().start()
        self._engine = asyncio.create_task(self._run())

    async def kill(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
        self._queue.clear()
        self._computing.clear()
        self._over.clear()
        await super().kill()

    def freeze(self) -> None:
        """Let the compute thread stand still; the event loop goes on answering heartbeats."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    def drain(self) -> None:
        """Tell every peer to move its sessions."""
        for stream in self._streams:
            stream.answers.put(pb.VerifyAnswer(drain=pb.Drain(grace_ms=1000)))

    def break_streams(self) -> None:
        """End every stream from this side; the process lives on."""
        for stream in self._streams:
            stream.answers.close()

    async def __aexit__(self, *exc_info: object) -> None:
        await super().__aexit__(*exc_info)
        if self._losing is not None:
            await self._losing

    def take(self, stream: _Stream, command: pb.VerifyCommand) -> None:
        """Take one command off the wire."""
        kind = command.WhichOneof("command")
        if kind == "heartbeat":
            if self.answer_heartbeats:
                queued = len(self._queue) + len(self._computing)
                beat = pb.Heartbeat(
                    step_counter=self._step_counter, num_queued=queued, num_sessions=len(stream.sessions)
                )
                stream.answers.put(pb.VerifyAnswer(heartbeat=beat))
            return
        self.counts[str(kind)] += 1
        if kind in ("finish", "abort"):
            self._end(stream, command.session_id)
            return
        self._queue.append((stream, command))
        self.largest_queue = max(self.largest_queue, len(self._queue))
        self._work.set()

    def _end(self, stream: _Stream, session_id: int) -> None:
        stream.sessions.pop(session_id, None)
        for one, command in (*self._queue, *self._computing):
            if one is stream and command.session_id == session_id and command.HasField("open"):
                self._over.add((stream, session_id))

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            # Commands that arrive in the same turn of the loop share a step, as in a real scheduler.
            await asyncio.sleep(0)
            batch = [self._queue.popleft() for _ in range(min(len(self._queue), self.max_num_seqs))]
            if not self._queue:
                self._work.clear()
            if not batch:
                continue
            self._computing = batch
            self.largest_batch = max(self.largest_batch, len(batch))
            num_tokens = sum(1 + len(command.verify.draft_token_ids) for _, command in batch)
            await self._running.wait()
            await asyncio.sleep(self.step_s + self.step_per_token_s * num_tokens)
            await self._running.wait()
            self._step_counter += 1
            self._computing = []
            for stream, command in batch:
                if self._losses(stream, command):
                    self._losing = asyncio.create_task(self.kill())
                    return
                for answer in self._answers(stream, command, len(batch), num_tokens):
                    stream.answers.put(answer)
                if (stream, command.session_id) in self._over:
                    self._over.discard((stream, command.session_id))
                    stream.sessions.pop(command.session_id, None)

    def _losses(self, stream: _Stream, command: pb.VerifyCommand) -> bool:
        session = stream.sessions.get(command.session_id)
        return (command.open.request_id or (session.request_id if session else "")) in self.lose_on

    def _answers(
        self, stream: _Stream, command: pb.VerifyCommand, batch_requests: int, batch_tokens: int
    ) -> list[pb.VerifyAnswer]:
        if stream not in self._streams:
            return []
        answer = pb.VerifyAnswer(session_id=command.session_id)
        forward_us = round(1e6 * (self.step_s + self.step_per_token_s * batch_tokens))
        opens = command.WhichOneof("command") == "open"
        try:
            found = self._open(stream, command) if opens else self._verify(stream, command)
            found = replace(found, forward_us=forward_us, batch_requests=batch_requests, batch_tokens=batch_tokens)
            if opens:
                answer.opened.CopyFrom(convert.opened_to_pb(found))
            else:
                answer.verified.CopyFrom(convert.verified_to_pb(found, command.verify.round_index))
        except MootError as error:
            stream.sessions.pop(command.session_id, None)
            failed = convert.failed_to_pb(type(error), str(error), command.verify.round_index)
            answer.failed.CopyFrom(failed)
        answers = [answer]
        if self.stale_answers and answer.HasField("verified"):
            stale, unknown = deepcopy(answer), deepcopy(answer)
            stale.verified.round_index += 1
            unknown.session_id += 1 << 62
            answers = [stale, unknown, answer]
        return [*answers, answer] if self.double_answers else answers

    def _open(self, stream: _Stream, command: pb.VerifyCommand) -> Verification:
        opening = command.open
        self._fail_on_purpose(opening.request_id)
        self.counts["opens_with_candidates"] += opening.num_top_candidates > 0
        self.cache_salts.add(opening.cache_salt)
        prefix = [*opening.prompt_token_ids, *opening.output_token_ids]
        params = convert.sampling_from_pb(opening.sampling)
        if len(prefix) >= self.info.context_limit:
            raise InvalidRequest("the prefix does not fit the context")
        num_prompt, num_top_candidates = len(opening.prompt_token_ids), opening.num_top_candidates
        session = VerifiedSession(prefix, num_prompt, params, opening.request_id, num_top_candidates)
        session.inside_drafter_ids, session.inside_width = tuple(opening.inside_drafter_ids), opening.inside_width
        stream.sessions[command.session_id] = session
        return self._advance(stream, command.session_id, session, Draft(), opening.num_inside_tokens)

    def _verify(self, stream: _Stream, command: pb.VerifyCommand) -> Verification:
        session = stream.sessions.get(command.session_id)
        if session is None:
            raise UnknownSession("no such session")
        self._fail_on_purpose(session.request_id)
        if session.request_id in self.forget:
            self.forget.discard(session.request_id)
            raise UnknownSession("no such session")
        message = command.verify
        if message.base_length != len(session.prefix) or message.round_index <= session.round_index:
            raise InvalidRequest("base_length or round_index do not fit the session")
        draft = convert.draft_from_pb(message)
        if len(draft) > self.max_draft_tokens or any(token >= self.info.vocab_size for token in draft.token_ids):
            raise InvalidRequest("the draft is too long or leaves the vocabulary")
        session.round_index = message.round_index
        return self._advance(stream, command.session_id, session, draft, message.num_inside_tokens)

    def _advance(
        self, stream: _Stream, session_id: int, session: VerifiedSession, draft: Draft, num_inside_tokens: int
    ) -> Verification:
        verification = session.advance(self.text, draft, self.info.context_limit)
        self.wishes.append(num_inside_tokens)
        if verification.finish_reason is not None:
            stream.sessions.pop(session_id, None)
        elif num_inside_tokens:
            verification = replace(verification, proposals=tuple(self._attached_of(session, num_inside_tokens)))
        return verification

    def _attached_of(self, session: VerifiedSession, num_tokens: int) -> Iterator[Proposal]:
        for name in session.inside_drafter_ids:
            if name in self.attached:
                for ids in self.attached[name](session, num_tokens, session.inside_width):
                    yield Proposal(tuple(ids), (200,) * len(ids), name)

    def _fail_on_purpose(self, request_id: str) -> None:
        if request_id in self.poison:
            raise RequestPoisoned("the model's numbers are not finite for this request")
        if request_id in self.refuse_capacity:
            raise NoCapacity("no room for another sequence")

    async def Describe(
        self, request: pb.DescribeVerifierRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeVerifierResponse:
        return pb.DescribeVerifierResponse(
            model=convert.model_info_to_pb(self.info),
            kv_capacity_tokens=1 << 20,
            numerics_fingerprint=self.numerics_fingerprint,
            max_num_seqs=self.max_num_seqs,
            max_draft_tokens=self.max_draft_tokens,
            deterministic=True,
            drafters=[pb.InsideDrafter(drafter_id=one, kind="scripted") for one in self.attached],
        )

    def Verify(
        self, request_iterator: AsyncIterator[pb.VerifyRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.VerifyResponse]:
        return self.serve(request_iterator, lambda answers: pb.VerifyResponse(answers=answers))
