"""The verifier without a wire: commands in, answers out, one thread that computes.

All state of sessions belongs to the compute thread and changes at step boundaries only. Other threads offer commands
(`submit`), end streams (`disconnect`) and read numbers (`stats`). Answers leave through the stream's `deliver`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from moot.core.errors import Draining, MootError, PeerError
from moot.core.types import ModelInfo
from moot.model.runner import ModelRunner
from moot.runtime.faults import fault, fault_delay_s
from moot.runtime.metrics import Metrics
from moot.runtime.tracing import Tracing
from moot.runtime.worker import WorkerThread
from services.verifier.command_queue import CommandQueue
from services.verifier.commands import Answer, Command
from services.verifier.config import VerifierConfig
from services.verifier.engine_loop import EngineLoop
from services.verifier.sessions import AnswerStream

_log = logging.getLogger("moot.verifier")

IDLE_CHECK_S = 0.5
"""How often an idle compute thread looks for sessions whose lease is over."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Numbers of the engine. `num_queued`: commands accepted and not yet answered. `step_counter` grows per layer and
    tile, and each time that an idle compute thread looks for work: while it stands still the thread is stuck."""

    step_counter: int
    num_queued: int
    num_sessions: int
    kv_cache_usage_ratio: float


class Engine:
    """The engine of a verifier. `start` it; or call `step` yourself, always from one thread.

    `on_death` is called on the compute thread when it cannot go on; all sessions have been failed by then.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: VerifierConfig,
        metrics: Metrics | None = None,
        on_death: Callable[[], None] = lambda: None,
        tracing: Tracing | None = None,
    ) -> None:
        self.runner = runner
        self.config = config
        self.metrics = metrics or Metrics()
        limit = min(config.max_model_len or runner.info.context_limit, runner.info.context_limit)
        # Any one session must fit alone, or preemption could go round for ever.
        self.info: ModelInfo = replace(runner.info, context_limit=min(limit, runner.pool.capacity_tokens))
        self._command_queue = CommandQueue(
            config.max_num_seqs + config.max_waiting_seqs,
            config.max_waiting_tokens,
            config.service.max_queued_commands,
            self.info.context_limit,
        )
        self.serving = EngineLoop(runner, self.info, config, self._command_queue, self.metrics, self._progress, tracing)
        self._step_counter = 0
        self._progress_ns = time.monotonic_ns()
        self._on_death = on_death
        self._stopping = False
        self._worker: WorkerThread | None = None

    def connect(self, deliver: Callable[[Sequence[Answer]], None]) -> AnswerStream:
        """Connect a stream, which will own sessions. `deliver` gets answers, mostly on the compute thread: it must not
        block."""
        return AnswerStream(deliver)

    def submit(self, stream: AnswerStream, commands: Sequence[Command]) -> None:
        """Queue commands, in order. Raises NoCapacity when commands flood the engine: disconnect the stream."""
        if refused := self._command_queue.offer(stream, commands):
            stream.deliver(refused)

    def disconnect(self, stream: AnswerStream) -> None:
        """Abort every session of the stream at the next step boundary."""
        self._command_queue.end(stream)

    @property
    def stats(self) -> EngineStats:
        load = self.serving.load
        return EngineStats(
            self._step_counter,
            self._command_queue.num_queued + load.num_working,
            self._command_queue.num_sessions,
            load.kv_cache_usage_ratio,
        )

    @property
    def is_running(self) -> bool:
        return self._worker is not None and self._worker.is_alive

    @property
    def is_alive(self) -> bool:
        """Whether the compute thread runs and has shown progress within `stall_limit_s`; an idle one does, too."""
        stalled_s = (time.monotonic_ns() - self._progress_ns) / 1e9
        return self.is_running and stalled_s <= self.config.service.stall_limit_s

    def start(self, worker: WorkerThread | None = None) -> None:
        """Compute on `worker` from now on, the thread that made the runner. It ends with the engine."""
        self._worker = worker or WorkerThread("compute")
        self._worker.submit(self._run)
        self._worker.finish()

    def drain(self) -> None:
        """Drain: open nothing new; what runs may finish."""
        self._command_queue.drain()

    def stop(self) -> None:
        """End the compute thread; sessions that are left fail with DRAINING. Waits at most `stop_timeout_s`."""
        self._command_queue.drain()
        self._stopping = True
        self._command_queue.wake()
        if self._worker is not None:
            self._worker.join(self.config.service.stop_timeout_s)

    def step(self) -> bool:
        """Take what has arrived, compute one batch, deliver the answers. False: there was nothing to compute."""
        if delay_s := fault_delay_s(fault("verifier.step")):
            time.sleep(delay_s)
        with torch.inference_mode():
            self._take()
            worked = self.serving.step()
        self._deliver()
        return worked

    def _take(self) -> None:
        for arrival in self._command_queue.take():
            self.serving.apply(arrival)

    @torch.inference_mode()
    def _gather(self) -> None:
        """Take commands until no session is waited for any more. Answers to commands go out with the next step."""
        self._take()
        while not self._stopping and (seconds := self.serving.seconds_to_wait()):
            self._command_queue.wait(seconds)
            self._take()

    def _run(self) -> None:
        _log.info("computing")
        try:
            while not self._stopping:
                self._progress()
                self._gather()
                if not self.step():
                    self._command_queue.wait(IDLE_CHECK_S)
            self._end_all(Draining, "this verifier is going away")
        except Exception as error:  # noqa: BLE001 - the thread's last words; the process is ended by `on_death`
            _log.critical("the compute thread cannot go on", exc_info=error)
            self._command_queue.drain()
            try:
                self._end_all(PeerError, "this verifier cannot go on")
            finally:
                self._on_death()

    def _end_all(self, error: type[MootError], message: str) -> None:
        with torch.inference_mode():
            self._take()
            self.serving.fail_all(error, message)
        self._deliver()

    def _deliver(self) -> None:
        for stream, answers in self.serving.take_answers().items():
            try:
                stream.deliver(answers)
            except RuntimeError as error:
                # The event loop behind it is closed: nobody reads this stream any more.
                _log.warning("a stream could not be answered", exc_info=error)
                self._command_queue.end(stream)

    def _progress(self) -> None:
        self._step_counter += 1
        self._progress_ns = time.monotonic_ns()
