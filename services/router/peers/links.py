"""One peer address: connect, ask what stands behind it, keep one stream, and begin again when it breaks.

    connecting ──► ready ◄──► ejected            three failures; comes back by itself
        ▲            │  └──► draining            the peer goes away: nothing new is opened there
        │            ▼
       lost ◄── any of them                      backoff with jitter, then connecting
     refused                                     another tokenizer, model or certificate: asked again, more rarely

What is specific to drafters and verifiers (messages, sessions) is in the subclasses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar

import grpc.aio
from google.protobuf.message import Message

from moot.core.errors import BodyTooLarge, PeerLost, PeerRefused
from moot.core.options import Options, option, part
from moot.rpc.link import (
    ITEM_OVERHEAD_BYTES,
    STREAM_ERRORS,
    FrameQueue,
    FrameQueueFull,
    Handed,
    LinkConfig,
    failure_of,
    open_channel,
)
from moot.rpc.tls import PodTls
from moot.runtime.metrics import Tally
from moot.runtime.process import MAX_QUEUED_COMMANDS

_log = logging.getLogger("moot.router.links")

CommandT = TypeVar("CommandT", bound=Message)


class PeerState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPolicy(Options):
    """Options of a link; durations in seconds."""

    link: LinkConfig = part(LinkConfig)
    tls: PodTls | None = None
    backoff_min_s: float = option(
        0.1, help="seconds until a lost peer is connected to again: the first time, then more each time", above=0
    )
    backoff_max_s: float = option(5.0, help="most seconds until a lost peer is connected to again", above=0)
    refused_retry_s: float = option(
        10.0, help="seconds until a peer with another tokenizer, model or certificate is asked again", above=0
    )
    max_queued_commands: int = option(
        MAX_QUEUED_COMMANDS,
        help="most commands to one peer that wait to be sent; with more the stream is ended",
        minimum=1,
    )
    describe_timeout_ms: int = option(2_000, help="milliseconds to connect to a peer and hear what it is", minimum=1)


@dataclass(frozen=True, slots=True)
class _Queued(Generic[CommandT]):
    command: CommandT
    num_bytes: int
    since: float
    """When the message was read that this command follows; 0: it follows none."""


_session_ids = itertools.count(secrets.randbits(31) << 32 | 1)
_turns = itertools.count(1)


def new_session_id() -> int:
    """A session id never used before by this process, and hardly by another one: an answer to an old session matches
    nothing."""
    return next(_session_ids)


class PeerLink(ABC, Generic[CommandT]):
    """A link to one peer. `on_state` is called after every change of state. All methods belong to one event loop."""

    role: str

    def __init__(self, address: str, policy: LinkPolicy, on_state: Callable[[], None], turn: Tally) -> None:
        """`turn` is told how long each command took that followed a message, until it was written."""
        self.read_at = 0.0
        """When the frame was read whose answers are being handed out (the loop's time)."""
        self.address = address
        self.state = PeerState.CONNECTING
        self.refusal: str | None = None
        # Routers that have chosen no peer yet must not all begin with the same one.
        self._last_turn = -random.random()
        self._has_left = False
        self._policy = policy
        self._on_state = on_state
        self._turn = turn
        self._queue: FrameQueue[_Queued[CommandT]] | None = None
        self._call: grpc.aio.StreamStreamCall[Any, Any] | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None
        self._stopped = False

    def start(self) -> None:
        self._task = asyncio.create_task(self._live(), name=f"{self.role} {self.address}")

    async def stop(self) -> None:
        """End the stream and everything that waits on it."""
        task, self._task = self._task, None
        if task is not None:
            # A call that fails in the very moment in which it is cancelled swallows the cancellation: hence the flag.
            self._stopped = True
            task.cancel()
            await asyncio.wait([task])

    @property
    def is_ready(self) -> bool:
        return self.state is PeerState.READY

    @property
    @abstractmethod
    def load(self) -> int:
        """Number of sessions open on this link."""

    @property
    def rank(self) -> tuple[int, float]:
        """Rank for choosing, the least first: the least loaded, and of equals the one not chosen for longest. Without
        the second part the same link would get everything as long as no link is busy."""
        return self.load, self._last_turn

    def take_turn(self) -> None:
        """Note that the link has been chosen."""
        self._last_turn = next(_turns)

    @abstractmethod
    async def _describe(self, channel: grpc.aio.Channel) -> None:
        """Ask the peer what it is and remember it. Raises PeerRefused when it must not be used."""

    @abstractmethod
    def _open_stream(self, channel: grpc.aio.Channel) -> grpc.aio.StreamStreamCall[Any, Any]: ...

    @abstractmethod
    def _frame(self, commands: list[CommandT]) -> Any:
        """One request message of these commands."""

    @abstractmethod
    def _dispatch(self, response: Any) -> None:
        """Hand the answers of one frame to the sessions. Raises PeerLost when the stream makes no sense any more."""

    @abstractmethod
    def _lost(self, reason: str) -> None:
        """Tell every session that the stream is gone, and forget them all."""

    def send(self, command: CommandT, since: float = 0.0) -> None:
        """Queue a command that follows a message read at `since`. Raises PeerLost when there is no stream or the peer
        does not take what is queued, and BodyTooLarge for a command that no message holds: sent, it would break the
        stream of all others."""
        if self._queue is None:
            raise PeerLost(f"{self.role} {self.address} is not connected")
        limit = self._policy.link.max_message_bytes
        num_bytes = command.ByteSize()
        if num_bytes + ITEM_OVERHEAD_BYTES > limit:
            raise BodyTooLarge(f"the request is too large for a message to a {self.role} (at most {limit} bytes)")
        try:
            self._queue.put(_Queued(command, num_bytes, since))
        except FrameQueueFull as error:
            self._overflow("does not take what is queued")
            raise PeerLost(f"{self.role} {self.address} does not take what is queued") from error

    def break_stream(self, reason: str) -> None:
        """Give the stream up; its sessions are told at once, and the link begins anew."""
        self._close_stream(reason)

    def _overflow(self, reason: str) -> None:
        """Handle a full queue on this side."""
        self.break_stream(reason)

    def leave(self) -> None:
        """Give up the stream of a peer that goes away. The next process at its address is not there at once."""
        self._has_left = True
        self._close_stream("the peer goes away")

    def _set_state(self, state: PeerState) -> None:
        if state is not self.state:
            _log.info("peer", extra={"role": self.role, "address": self.address, "state": state.value})
            self.state = state
            self._on_state()

    async def _live(self) -> None:
        failures = 0
        try:
            while not self._stopped:
                pause = self._policy.backoff_max_s
                try:
                    async with open_channel(self.address, self._policy.link, self._policy.tls, self.role) as channel:
                        self._set_state(PeerState.CONNECTING)
                        async with asyncio.timeout(self._policy.describe_timeout_ms / 1000):
                            await self._ask(channel)
                        self.refusal = self._failure = None
                        failures = 0
                        await self._run_stream(channel)
                except PeerRefused as error:
                    self.refusal = str(error)
                    _log.error("peer refused", extra={"address": self.address, "reason": self.refusal})
                    self._set_state(PeerState.REFUSED)
                    pause = self._policy.refused_retry_s
                except (*STREAM_ERRORS, OSError, TimeoutError, PeerLost) as error:
                    _log.debug("peer lost", extra={"address": self.address, "reason": type(error).__name__})
                except Exception:  # noqa: BLE001 - one bad answer must not end the only task that would reconnect
                    _log.exception("peer lost", extra={"address": self.address})
                if self.state is not PeerState.REFUSED:
                    self._set_state(PeerState.LOST)
                    if not self._has_left:
                        pause = min(pause, self._policy.backoff_min_s * 2.0 ** min(failures, 16))
                    self._has_left = False
                if self._stopped:
                    return
                failures += 1
                # Half of it at random: replicas of the router must not come back all at once.
                await asyncio.sleep(pause * (0.5 + random.random() / 2))
        finally:
            self._close_stream("the router stops")

    async def _ask(self, channel: grpc.aio.Channel) -> None:
        try:
            await self._describe(channel)
        except grpc.aio.AioRpcError as error:
            tls = self._policy.tls
            failure = failure_of(error, None if tls is None else tls.identity.peer(self.role).server_name)
            # A peer that is not there fails several times a second: said once.
            if isinstance(failure, PeerLost) and (reason := str(failure)) != self._failure:
                self._failure = reason
                _log.info("peer not reached", extra={"role": self.role, "address": self.address, "reason": reason})
            raise failure from error

    async def _run_stream(self, channel: grpc.aio.Channel) -> None:
        queue: FrameQueue[_Queued[CommandT]] = FrameQueue(
            self._policy.max_queued_commands,
            max_frame_bytes=self._policy.link.max_message_bytes,
            size_of=lambda queued: queued.num_bytes,
        )
        call = self._open_stream(channel)
        self._queue, self._call = queue, call
        writer = asyncio.create_task(self._write(call, queue), name=f"write {self.role} {self.address}")
        self._set_state(PeerState.READY)
        reason = "the peer ended the stream"
        loop = asyncio.get_running_loop()
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                self.read_at = loop.time()
                self._dispatch(response)
        except (*STREAM_ERRORS, PeerLost) as error:
            reason = str(error) if isinstance(error, PeerLost) else f"the stream broke ({type(error).__name__})"
        except asyncio.CancelledError:
            # Reading a call that break_stream has cancelled raises this too; only a cancelled link may end here.
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]  # inside a task by construction
                raise
        finally:
            if self._call is call:
                self._close_stream(reason)
            writer.cancel()
            await asyncio.wait([writer])

    async def _write(self, call: grpc.aio.StreamStreamCall[Any, Any], queue: FrameQueue[_Queued[CommandT]]) -> None:
        """Write frames until the queue is closed. A stream that does not take a frame is given up."""
        try:
            while frame := await queue.next_frame():
                message = self._frame([queued.command for queued in frame])
                await Handed(call.write(message), partial(self._note_written, frame))
            await call.done_writing()
        except STREAM_ERRORS as error:
            _log.debug("stream not written", extra={"address": self.address, "reason": type(error).__name__})
            call.cancel()
        except Exception:  # noqa: BLE001 - whatever it is, the stream must not look alive
            _log.exception("stream not written", extra={"address": self.address})
            call.cancel()

    def _note_written(self, frame: list[_Queued[CommandT]]) -> None:
        written_at = asyncio.get_running_loop().time()
        for queued in frame:
            if queued.since:
                self._turn.observe(written_at - queued.since)

    def _close_stream(self, reason: str) -> None:
        call, queue, self._call, self._queue = self._call, self._queue, None, None
        if queue is not None:
            queue.close()
        if call is not None:
            call.cancel()
            self._set_state(PeerState.LOST)
            self._lost(reason)
