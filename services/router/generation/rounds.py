"""The rounds of a request: plan, ask the drafters, vote, verify, commit, emit, learn. It knows no transport.

Two tasks serve a request. One runs the rounds; the other, the caller's, commits what they bring to the store and hands
it out, so that committing one round overlaps drafting and verifying the next and no token is shown before its commit.
Whatever drafters, votes and moves do, only the verifier's tokens reach the text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from moot.core.errors import DeadlineExceeded, MootError, NoCapacity, PeerError, StoreError
from moot.core.generation import Generation
from moot.core.speculation.policy import RoundPlan
from moot.core.types import FinishReason, Verification
from moot.drafters.interface import RequestContext
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import traceparent_var
from services.router.generation.counters import Known, RoundCounters
from services.router.generation.drafter_set import DrafterSet
from services.router.generation.ports import Prefix, ProposalCollector, Targets
from services.router.generation.request_types import (
    DrafterMetrics,
    GenerationChunk,
    GenerationMetrics,
    GenerationRequest,
    RequestRecord,
    RequestStore,
    TextAssembler,
    TextDelta,
)

_log = logging.getLogger("moot.router.rounds")

_RESUMABLE = (NoCapacity, DeadlineExceeded, PeerError)
"""Faults around a request, not of it: its record stays open, so that it can be taken up again."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as a request's record names it."""

    name: str
    tokenizer_fingerprint: str


class Rounds:
    """The `Generator` of request_types.py."""

    def __init__(
        self,
        targets: Targets,
        drafter_set: DrafterSet,
        store: RequestStore,
        model: ServedModel,
        metrics: Metrics,
        max_buffered_commits: int,
    ) -> None:
        self._targets = targets
        self._drafter_set = drafter_set
        self._store = store
        self._model = model
        self._metrics = metrics
        self._counters = RoundCounters(metrics)
        self._max_buffered_commits = max_buffered_commits
        self.num_running = 0

    async def generate(self, request: GenerationRequest, assembler: TextAssembler) -> AsyncIterator[GenerationChunk]:
        """Chunks of one choice. Raises what Target.open does, StoreError when another router owns the request."""
        commit_queue = _Spans(self._max_buffered_commits)
        course = _Course(
            self._targets, self._drafter_set, request, assembler, commit_queue, self._metrics, self._counters
        )
        task = asyncio.create_task(course.run())
        committed, epoch = len(request.output_token_ids), request.epoch or 1
        ending: FinishReason | None = FinishReason.ABORT
        unsettled: GenerationChunk | None = None
        self.num_running += 1
        try:
            if not request.epoch:
                await self._store.create(self._record(request))
            while (committed_tokens := await commit_queue.take()) is not None:
                unsettled = committed_tokens
                durable = await self._commit(request.request_id, epoch, committed, committed_tokens)
                unsettled = None
                committed += len(committed_tokens.token_ids)
                self._metrics.generation_tokens.inc(len(committed_tokens.token_ids))
                if committed_tokens.finish_reason is not None:
                    ending = None
                yield committed_tokens if durable else replace(committed_tokens, durable=False)
        except StoreError:
            # Not ours any more: the owner of the record decides about its end.
            ending = None
            raise
        except MootError as error:
            resumable = committed > len(request.output_token_ids) and isinstance(error, _RESUMABLE)
            ending = None if resumable else FinishReason.ERROR
            raise
        except Exception:
            ending = FinishReason.ERROR
            raise
        finally:
            self.num_running -= 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            try:
                if ending is not None:
                    await self._close_record(request.request_id, epoch, committed, unsettled, ending)
            finally:
                self._store.release(request.request_id)

    def _record(self, request: GenerationRequest) -> RequestRecord:
        return RequestRecord(
            request_id=request.request_id,
            epoch=1,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=request.output_token_ids,
            params=request.params,
            model=self._model.name,
            tokenizer_fingerprint=self._model.tokenizer_fingerprint,
            stop_strings=request.stop_strings,
            skip_special_tokens=request.skip_special_tokens,
            include_stop_str_in_output=request.include_stop_str_in_output,
            body_fingerprint=request.body_fingerprint,
        )

    async def _commit(self, request_id: str, epoch: int, committed: int, committed_tokens: GenerationChunk) -> bool:
        started = time.monotonic()
        try:
            return await self._store.commit(
                request_id, epoch, committed, committed_tokens.token_ids, committed_tokens.finish_reason
            )
        finally:
            self._metrics.store_commit_seconds.observe(time.monotonic() - started)

    async def _close_record(
        self, request_id: str, epoch: int, committed: int, unsettled: GenerationChunk | None, reason: FinishReason
    ) -> None:
        """End the record. `unsettled`: the committed tokens whose commit was cut off. Whether it was applied is not
        known; sent again it counts once."""
        try:
            if unsettled is not None:
                await self._commit(request_id, epoch, committed, unsettled)
                committed += len(unsettled.token_ids)
            if unsettled is None or unsettled.finish_reason is None:
                await self._store.commit(request_id, epoch, committed, (), reason)
        except StoreError as error:
            # It was never written, or it has ended or another owner by now: there is nothing left to close.
            _log.debug("record not closed", extra={"cause": type(error).__name__})


class _Course:
    """One request from its opening to its end."""

    def __init__(
        self,
        targets: Targets,
        drafter_set: DrafterSet,
        request: GenerationRequest,
        assembler: TextAssembler,
        commit_queue: _Spans,
        metrics: Metrics,
        counters: RoundCounters,
    ) -> None:
        self._generation = Generation(request.prompt_token_ids, request.params, list(request.output_token_ids))
        self._prefix = Prefix(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            params=request.params,
            output_token_ids=self._generation.output_token_ids,
            cache_salt=request.cache_salt,
            traceparent=traceparent_var.get(),
            request_context=RequestContext(
                prompt_length=len(request.prompt_token_ids),
                prediction_token_ids=request.prediction_token_ids,
                siblings=request.siblings,
                choice_index=request.choice_index,
            ),
        )
        self._prefix.note(())
        self._request_drafters = drafter_set.open(self._prefix, request.drafters, request.num_speculative_tokens)
        self._targets = targets
        self._target = targets.target(self._prefix, self._request_drafters.num_top_candidates)
        self._assembler = assembler
        self._commit_queue = commit_queue
        self._metrics = metrics
        self._counters = counters
        self._known: Known = {}
        self._asked: tuple[RoundPlan, ProposalCollector] | None = None
        """What the next round has asked already."""
        self._busy_s = 0.0
        """How long this process has been busy with the round under way; never while it waited for peers."""

    async def run(self) -> None:
        """Run the rounds to their end. In every case it ends the commit queue, and frees drafters and verifier."""
        generation = self._generation
        error: BaseException | None = None
        try:
            self._request_drafters.prepare()
            opening = await self._target.open()
            self._metrics.prompt_tokens.inc(len(generation.prompt_token_ids))
            await self._commit_opening(opening)
            while not generation.is_finished:
                await self._round()
        except Exception as caught:  # noqa: BLE001 - raised again to the reader of the commit queue
            error = caught
        finally:
            self._target.end(aborted=not generation.is_finished)
            self._request_drafters.end(aborted=not generation.is_finished)
            self._commit_queue.end(error)

    async def _round(self) -> None:
        request_drafters, target, generation = self._request_drafters, self._target, self._generation
        plan, box = self._asked or await self._ask()
        self._asked = None
        proposals = await request_drafters.collect(box, plan, self._targets.vocab_size)
        draft_seconds = request_drafters.draft_seconds
        began = time.perf_counter()
        result = request_drafters.vote(plan, proposals, target.verifier_id)
        own_seconds = self._busy_s + time.perf_counter() - began
        verification, moved = await target.verify(result.draft)
        if moved:
            return await self._commit_opening(verification)
        delta = self._assembler.push(verification.output_token_ids)
        verification = generation.advance(
            verification, result.draft, proposals, result.winner_ids, delta.num_tokens_kept, delta.stopped
        )
        round_seconds = request_drafters.draft_seconds
        request_drafters.hear_attached(verification)
        await self._emit(verification, delta)
        try:
            if not generation.is_finished:
                # Drafters work while the router learns; so K knows the rounds before this one.
                self._asked = await self._ask()
                if self._asked[1].is_waiting:
                    await asyncio.sleep(0)  # let the questions be written first
        finally:
            began = time.perf_counter()
            request_drafters.learn(plan, result, verification, draft_seconds, round_seconds, own_seconds)
            self._counters.count(result.draft, verification, generation, self._known)
            num_tokens, verify_seconds = len(verification.output_token_ids), round_seconds - draft_seconds
            self._counters.time(verification, num_tokens, draft_seconds, verify_seconds)
            self._busy_s += time.perf_counter() - began

    async def _ask(self) -> tuple[RoundPlan, ProposalCollector]:
        """Plan a round and ask the drafters, as soon as there is room for its draft."""
        request_drafters = self._request_drafters
        await self._target.room()
        began = time.perf_counter()
        plan = request_drafters.plan(self._generation, self._targets.context_limit, self._targets.max_draft_tokens)
        box = request_drafters.ask(plan)
        self._busy_s = time.perf_counter() - began
        return plan, box

    async def _commit_opening(self, verification: Verification) -> None:
        """Commit the first token, or the first one after a move. It is no round."""
        delta = self._assembler.push(verification.output_token_ids)
        verification = self._generation.open(verification, delta.num_tokens_kept, delta.stopped)
        self._request_drafters.hear_attached(verification)
        await self._emit(verification, delta)

    async def _emit(self, verification: Verification, delta: TextDelta) -> None:
        """Put what a committed verification brought into the commit queue."""
        self._prefix.note(verification.top_candidates)
        token_ids, text, finish = verification.output_token_ids, delta.text, verification.finish_reason
        stop_reason: str | int | None = delta.stop_reason
        if finish is not None and not delta.stopped:
            text += self._assembler.flush()
            # The id that ended the request, where it is one of the caller's own.
            if finish is FinishReason.STOP and token_ids[-1] in self._generation.params.stop_token_ids:
                stop_reason = token_ids[-1]
        metrics = None if finish is None else self._summary()
        await self._commit_queue.put(
            GenerationChunk(text, token_ids, verification.logprobs, finish, stop_reason, metrics)
        )

    def _summary(self) -> GenerationMetrics:
        generation = self._generation
        return GenerationMetrics(
            num_prompt_tokens=len(generation.prompt_token_ids),
            num_output_tokens=len(generation.output_token_ids),
            num_cached_tokens=generation.num_cached_tokens,
            num_rounds=generation.num_rounds,
            num_draft_tokens=generation.num_draft_tokens,
            num_accepted_tokens=generation.num_accepted_tokens,
            num_accepted_tokens_per_position=tuple(generation.num_accepted_tokens_per_position),
            drafters={
                drafter_id: DrafterMetrics(count.num_proposed_tokens, count.num_accepted_tokens, count.num_votes_won)
                for drafter_id, count in generation.drafters.items()
            },
        )


class _Spans:
    """The commit queue of one request: committed tokens between its rounds and their reader, bounded, and merged when
    the reader lags.

    The rounds put, the reader takes everything that is there as one chunk. So a store or a client that is slow for a
    moment costs no round, and one that stays slow pauses this request only. One writer, one reader, one event loop.
    """

    def __init__(self, max_commits: int) -> None:
        self._max_commits = max_commits
        self._commit_queue: deque[GenerationChunk] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def put(self, committed_tokens: GenerationChunk) -> None:
        """Waits while the reader is `max_commits` behind."""
        while len(self._commit_queue) >= self._max_commits:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        self._commit_queue.append(committed_tokens)
        # One turn later: the writer goes on to ask for the next round, whose questions are to be written first.
        asyncio.get_running_loop().call_soon(_wake, self._reader)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; `error` is raised to the reader after the chunks that are there."""
        self._ended = True
        self._error = error
        _wake(self._reader)

    async def take(self) -> GenerationChunk | None:
        """All that is there as one chunk; None at the end. Raises the error it was ended with."""
        while not self._commit_queue and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._commit_queue:
            if self._error is not None:
                raise self._error
            return None
        commit_queue = list(self._commit_queue)
        self._commit_queue.clear()
        _wake(self._writer)
        return commit_queue[0] if len(commit_queue) == 1 else _merged(commit_queue)


def _merged(commit_queue: list[GenerationChunk]) -> GenerationChunk:
    return replace(
        commit_queue[-1],
        text="".join(committed_tokens.text for committed_tokens in commit_queue),
        token_ids=tuple(token for committed_tokens in commit_queue for token in committed_tokens.token_ids),
        logprobs=tuple(entry for committed_tokens in commit_queue for entry in committed_tokens.logprobs),
    )


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
