"""What a router holds in memory of a request that it owns: enough to write its record anew."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from moot.core.errors import CommitConflict, CommitFenced, CommitTerminal, StoreError
from moot.core.types import FinishReason
from services.router.types import RequestRecord


@dataclasses.dataclass(slots=True)
class Mirror:
    """`header` has no output; the output grows in `output`. Times are of the event loop's clock, in seconds."""

    header: RequestRecord
    output: list[int]
    finish_reason: FinishReason | None
    touched_at: float
    lease_until: float
    synced_length: int | None = None
    """Output tokens that the server is known to have; None: it may have no record at all."""
    synced_finish: bool = False
    span_from: int = 0
    lost: StoreError | None = None
    """Why this router is not the owner any more."""
    released: bool = False
    """Nobody works on it here any more: it stays only until the server has what it lacks."""
    lock: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

    @classmethod
    def of(cls, record: RequestRecord, now: float, lease_s: float) -> Mirror:
        header = dataclasses.replace(record, output_token_ids=(), finish_reason=None)
        return cls(header, list(record.output_token_ids), record.finish_reason, now, now + lease_s)

    @property
    def request_id(self) -> str:
        return self.header.request_id

    @property
    def epoch(self) -> int:
        return self.header.epoch

    @property
    def is_synced(self) -> bool:
        return self.synced_length == len(self.output) and (self.finish_reason is None or self.synced_finish)

    def record(self) -> RequestRecord:
        return dataclasses.replace(self.header, output_token_ids=tuple(self.output), finish_reason=self.finish_reason)

    def accept(
        self, epoch: int, expected_length: int, token_ids: Sequence[int], finish_reason: FinishReason | None
    ) -> None:
        """Append by the server's rules, with or without the server. The same call twice counts once.

        Raises CommitFenced, CommitTerminal, CommitConflict, and whatever made this router lose the request.
        """
        if self.lost is not None:
            raise self.lost
        if epoch != self.epoch:
            raise CommitFenced("another owner has claimed this request")
        same_span = self.span_from <= expected_length and self.output[expected_length:] == list(token_ids)
        if same_span and expected_length <= len(self.output) and finish_reason == self.finish_reason:
            return
        if self.finish_reason is not None:
            raise CommitTerminal("this request has ended")
        if expected_length != len(self.output):
            raise CommitConflict(f"the record has {len(self.output)} output tokens, not {expected_length}")
        self.span_from = expected_length
        self.output.extend(token_ids)
        self.finish_reason = finish_reason
