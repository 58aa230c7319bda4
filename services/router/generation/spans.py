"""Committed spans between the rounds of one request and whoever reads them: bounded, and merged when the reader lags.

The rounds put, the reader takes everything that is there as one span. So a store or a client that is slow for a moment
costs no round, and one that stays slow pauses this request only.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from moot.core.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens in a row, with the text that they made safe to show."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class SpanQueue:
    """One writer, one reader, one event loop."""

    def __init__(self, max_spans: int) -> None:
        self._max_spans = max_spans
        self._spans: deque[Span] = deque()
        self._ended = False
        self._error: BaseException | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None

    async def put(self, span: Span) -> None:
        """Waits while the reader is `max_spans` behind."""
        while len(self._spans) >= self._max_spans:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
        self._spans.append(span)
        # One turn later: the writer goes on to ask for the next round, whose questions are to be written first.
        asyncio.get_running_loop().call_soon(_wake, self._reader)

    def end(self, error: BaseException | None = None) -> None:
        """Nothing more comes; `error` is raised to the reader after the spans that are there."""
        self._ended = True
        self._error = error
        _wake(self._reader)

    async def take(self) -> Span | None:
        """All that is there as one span; None at the end. Raises the error it was ended with."""
        while not self._spans and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        if not self._spans:
            if self._error is not None:
                raise self._error
            return None
        spans = list(self._spans)
        self._spans.clear()
        _wake(self._writer)
        return spans[0] if len(spans) == 1 else _merged(spans)


def _merged(spans: list[Span]) -> Span:
    return Span(
        token_ids=tuple(token for span in spans for token in span.token_ids),
        text="".join(span.text for span in spans),
        logprobs=tuple(entry for span in spans for entry in span.logprobs),
        finish_reason=spans[-1].finish_reason,
        stop_reason=spans[-1].stop_reason,
    )


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
