"""Requests that end before anything was generated, counted by the status that they are answered with."""

from __future__ import annotations

from types import TracebackType

from moot.core.errors import NoCapacity, RateLimited
from moot.metrics import Metrics
from services.router.http import errors
from services.router.http.middleware import ClientGone


class Attempt:
    """A request from its arrival until it generates; from then on its choices are counted as they end."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.is_generating = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A caller that goes away, and a task that is cancelled, were refused nothing.
        if isinstance(error, Exception) and not (self.is_generating or isinstance(error, ClientGone)):
            self._metrics.requests_refused.labels(str(errors.describe(error).status)).inc()
            if isinstance(error, NoCapacity | RateLimited):
                self._metrics.requests_turned_away.labels(error.shortage).inc()
