"""The engine loop: what the compute thread does between and during steps.

Sessions begin, advance and end here, and nowhere else.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from moot.core.batching_delay import CPU_SHARE, BatchingDelay
from moot.core.errors import MootError, OutOfMemory, UnknownSession, is_out_of_memory, row_of
from moot.core.scheduler import Batch, Limits, Scheduler
from moot.core.types import ModelInfo, Verification
from moot.drafters.attached.kinds import create_all_attached
from moot.model.backend import samples_at_once
from moot.model.cache.contiguous import PAGE_SLOTS
from moot.model.runner import ModelRunner
from moot.model.sampling.batch import BatchSampler
from moot.model.sampling.sampler import Sampler
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import Tracing
from services.verifier.attached_drafters import AttachedDrafters
from services.verifier.command_queue import Arrival, CommandAdmission, CommandQueue, Dropped
from services.verifier.commands import Abort, Answer, Failed, Finish, Open, Opened, Verified, Verify
from services.verifier.config import VerifierConfig
from services.verifier.prefix_cache import PrefixSharing
from services.verifier.sessions import AnswerStream, Session
from services.verifier.step import StepRunner
from services.verifier.walks import Broken, Prefilled, Sampled, Walks

_log = logging.getLogger("moot.verifier")


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load of the engine. `num_working`: sessions with work that is not answered yet."""

    num_working: int = 0
    kv_cache_usage_ratio: float = 0.0


class EngineLoop:
    """The sessions and their steps. Not thread-safe. `load` is replaced at both ends of each step and may be read from
    anywhere."""

    def __init__(
        self,
        runner: ModelRunner,
        info: ModelInfo,
        config: VerifierConfig,
        command_queue: CommandQueue,
        metrics: Metrics,
        progress: Callable[[], None],
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing or Tracing()
        self.load = EngineLoad()
        self.scheduler: Scheduler[Session] = Scheduler(
            Limits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.batches.max_num_batched_tokens,
                prefill_chunk_tokens=config.batches.prefill_chunk_tokens,
                num_pages=runner.pool.capacity_tokens // PAGE_SLOTS,
                page_tokens=PAGE_SLOTS,
            )
        )
        self.sharing = PrefixSharing(config.prefix_cache_tokens, config.prefix_block_tokens)
        sampler = Sampler(info.vocab_size, info.end_token_ids)
        batch_sampler = BatchSampler(sampler) if samples_at_once(runner) else None
        drafters = create_all_attached(config.drafters, "--drafters", runner)
        self.attached = AttachedDrafters(drafters, sampler, config.max_draft_tokens, metrics)
        walks = Walks(sampler, progress, batch_sampler)
        self.steps = StepRunner(runner, walks, progress, bool(drafters), self.sharing.give_up, self._count_shortage)
        self._pool = runner.pool
        self._admission = CommandAdmission(
            info, config.max_draft_tokens, config.link.max_message_bytes, runner.new_cache
        )
        self._command_queue = command_queue
        self._metrics = metrics
        self._idle_limit_s = config.service.session_idle_limit_s
        # Where a step is as quick as a draft, half of the requests draft while the others are verified.
        usual = CPU_SHARE if runner.device.type == "cpu" else 0.0
        self.batching_delay = BatchingDelay(
            usual if config.batching_delay_share is None else config.batching_delay_share
        )
        self._sessions: dict[int, Session] = {}
        self._answer_queue: dict[AnswerStream, list[Answer]] = defaultdict(list)

    def apply(self, arrival: Arrival) -> None:
        """Take one command in, at a step boundary."""
        stream, command = arrival.stream, arrival.command
        match command:
            case Open():
                self._open(stream, command, arrival.arrived_ns)
            case Verify():
                self._verify(stream, command, arrival.arrived_ns)
            case Finish() | Abort():
                # The session may have ended by itself meanwhile: that is no error.
                if session := stream.sessions.get(command.session_id):
                    self._end(session)
            case None:
                for session in list(stream.sessions.values()):
                    self._end(session)
                self._answer_queue.pop(stream, None)

    def step(self) -> bool:
        """Compute one batch. False when there is nothing that can be computed now."""
        self._expire()
        # Before the batch, too: a thread that stands still inside its first step must not look idle.
        self._note_load()
        changes = self.scheduler.rearrange()
        for session in changes.preempted:
            session.cache.free()
            session.cached_length = 0
        for session in changes.admitted:
            self._admit(session)
        batch = self.scheduler.plan()
        if batch.items:
            self._compute(batch)
        self._observe()
        return bool(batch.items)

    def seconds_to_wait(self) -> float:
        """How long the next step should wait for sessions that are about to have work, too; 0: there is none."""
        seconds = self.batching_delay.seconds_left(time.monotonic_ns())
        return seconds if seconds and self.scheduler.has_work else 0.0

    def take_answers(self) -> dict[AnswerStream, list[Answer]]:
        """Answers since the last call, in order, by stream."""
        answers, self._answer_queue = self._answer_queue, defaultdict(list)
        return answers

    def fail_all(self, error: type[MootError], message: str) -> None:
        for session in list(self._sessions.values()):
            self._fail(session, error, message)

    def _open(self, stream: AnswerStream, command: Open, arrived_ns: int) -> None:
        num_tokens = len(command.prompt_token_ids) + len(command.output_token_ids)
        try:
            result = self._admission.open(stream, command, arrived_ns)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._count_shortage("request")
            result = Failed(command.session_id, OutOfMemory, "no memory for this request")
        if isinstance(result, Session):
            result.num_waiting_tokens = num_tokens
            result.traced = self._tracing.begin("verifier session", command.traceparent, request_id=command.request_id)
            self._sessions[result.arrival] = result
            self.scheduler.submit(result)
            return
        self._command_queue.release(num_sessions=1, num_tokens=num_tokens)
        self._answer(stream, result)

    def _verify(self, stream: AnswerStream, command: Verify, arrived_ns: int) -> None:
        result = self._admission.verify(stream, command, arrived_ns)
        if isinstance(result, Session):
            self.batching_delay.came(result.arrival, arrived_ns)
            self.attached.guess(result)
            self.scheduler.submit(result)
            return
        if isinstance(result, Failed) and (session := stream.sessions.get(command.session_id)):
            self._end(session)
        self._answer(stream, result)

    def _admit(self, session: Session) -> None:
        """Give a session KV: first what other sessions have computed of its prompt."""
        num_cached = self._filled(session)
        if session.work is not None and session.work.is_opening and not session.was_admitted:
            session.num_cached_tokens = num_cached
            self._metrics.prefix_cache_queries.inc(session.num_prompt_tokens)
            self._metrics.prefix_cache_hits.inc(num_cached)
        session.was_admitted = True

    def _filled(self, session: Session) -> int:
        """Fill a session's cache from the prefix cache; returns how many tokens. Without memory for them they are
        computed, in steps as small as need be."""
        try:
            return self.sharing.fill(session)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        session.cache.free()
        session.cached_length = 0
        self._count_shortage("prefix")
        return 0

    def _keep(self, session: Session) -> None:
        try:
            self.sharing.keep(session)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.sharing.leave(session)
            self._count_shortage("prefix")

    def _count_shortage(self, cost: str) -> None:
        self._metrics.out_of_memory.labels(cost).inc()

    def _compute(self, batch: Batch[Session]) -> None:
        start_ns = time.monotonic_ns()
        num_tokens, works = batch.num_tokens, {item.session.arrival: item.session.work for item in batch.items}
        num_prefill = sum(item.num_tokens for item in batch.items if item.session.work and item.session.work.is_opening)
        outcomes = self.steps.run(batch.items)
        forward_ns = time.monotonic_ns() - start_ns
        self.batching_delay.stepped(forward_ns)
        proposals = self.attached.propose(outcomes)
        attached_ns = time.monotonic_ns() - start_ns - forward_ns if proposals else 0
        for outcome in outcomes:
            session, work = outcome.session, works[outcome.session.arrival]
            if isinstance(outcome, Broken):
                self._fail(session, outcome.error, outcome.message)
                continue
            self._keep(session)
            if isinstance(outcome, Prefilled) or work is None:
                continue
            verification = Verification(
                base_length=session.length - len(outcome.walk.output_token_ids),
                num_accepted=outcome.walk.num_accepted,
                output_token_ids=outcome.walk.output_token_ids,
                finish_reason=outcome.walk.finish,
                logprobs=outcome.logprobs,
                top_candidates=outcome.top_candidates,
                proposals=proposals.get(session.arrival, ()),
                num_cached_tokens=session.num_cached_tokens if work.is_opening else 0,
                queue_us=(start_ns - work.arrived_ns) // 1000,
                forward_us=forward_ns // 1000,
                batch_requests=len(batch.items),
                batch_tokens=num_tokens,
                inside_us=attached_ns // 1000,
                batch_prefill_tokens=num_prefill,
            )
            self._settle(session, outcome, verification, is_opening=work.is_opening)
        self._metrics.forward_seconds.observe(forward_ns / 1e9)
        if proposals:
            self._metrics.draft_seconds.observe(attached_ns / 1e9)
        self._metrics.verify_batch_size.observe(len(batch.items))
        self._metrics.verify_batch_tokens.observe(num_tokens)

    def _settle(self, session: Session, outcome: Sampled, verification: Verification, *, is_opening: bool) -> None:
        session.last_active_ns = time.monotonic_ns()
        if is_opening:
            session.traced.note(queue_us=verification.queue_us, num_cached_tokens=verification.num_cached_tokens)
            self._metrics.request_queue_time_seconds.observe(verification.queue_us / 1e6)
            self._answer(session.stream, Opened(session.session_id, verification))
            self._command_queue.release(num_tokens=session.num_waiting_tokens)
            session.num_waiting_tokens = 0
        else:
            self._answer(session.stream, Verified(session.session_id, session.round_index, verification))
        if outcome.walk.finish is not None:
            self._end(session)
        else:
            self.batching_delay.answered(session.arrival, session.last_active_ns)

    def _expire(self) -> None:
        lease_ends_ns = time.monotonic_ns() - int(self._idle_limit_s * 1e9)
        for session in [*self._sessions.values()]:
            if session.work is None and session.last_active_ns < lease_ends_ns:
                message = f"freed after {self._idle_limit_s:g} s without a command"
                self._fail(session, UnknownSession, message)

    def _fail(self, session: Session, error: type[MootError], message: str) -> None:
        round_index = max(session.round_index, 0)
        self._answer(session.stream, Failed(session.session_id, error, message, round_index))
        self._end(session, error=row_of(error).session_failure or "")

    def _end(self, session: Session, error: str = "") -> None:
        """End a session and free everything; the only place where one ends."""
        session.traced.note(num_rounds=session.round_index + 1, num_output_tokens=session.num_output_tokens)
        session.traced.end(error)
        session.stream.sessions.pop(session.session_id, None)
        del self._sessions[session.arrival]
        self.scheduler.remove(session)
        self.batching_delay.ended(session.arrival)
        self.attached.end(session)
        session.cache.free()
        self._command_queue.release(num_sessions=1, num_tokens=session.num_waiting_tokens)

    def _answer(self, stream: AnswerStream, result: Answer | Dropped) -> None:
        if isinstance(result, Dropped):
            self._metrics.answers_dropped.labels(role="router", reason=result.reason).inc()
        else:
            self._answer_queue[stream].append(result)

    def _note_load(self) -> None:
        num_working = sum(session.has_work for session in self._sessions.values())
        self.load = EngineLoad(num_working, self._pool.used_tokens / self._pool.capacity_tokens)

    def _observe(self) -> None:
        self._note_load()
        self._metrics.kv_cache_usage_ratio.set(self.load.kv_cache_usage_ratio)
        self._metrics.num_sessions.set(len(self._sessions))
        self._metrics.num_requests_running.set(self.scheduler.num_admitted)
        self._metrics.num_requests_waiting.set(self.scheduler.num_waiting)
        self._metrics.pool_depth.set(self.load.num_working)
