"""A request's record as bytes and back. Pure functions; the layout is described at the head of functions.lua.

A `Mirror` is what a router holds in memory of a request that it owns: enough to write its record anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from moot.core.errors import CommitConflict, CommitFenced, CommitTerminal, InvalidRequest, StoreError
from moot.core.types import FinishReason, SamplingParams
from services.router.generation.request_types import RequestRecord


@dataclasses.dataclass(slots=True)
class Mirror:
    """The record of one request in memory. `header` has no output; the output grows in `output`. Times are of the event
    loop's clock, in seconds."""

    header: RequestRecord
    output: list[int]
    finish_reason: FinishReason | None
    touched_at: float
    lease_until: float
    synced_length: int | None = None
    """Output tokens that the server is known to have; None: it may have no record at all."""
    synced_finish: bool = False
    committed_from: int = 0
    lost: StoreError | None = None
    """Why this router is not the owner any more."""
    released: bool = False
    """Whether this router is done with the request: the mirror stays only until the server has what it lacks."""
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
        same_commit = self.committed_from <= expected_length and self.output[expected_length:] == list(token_ids)
        if same_commit and expected_length <= len(self.output) and finish_reason == self.finish_reason:
            return
        if self.finish_reason is not None:
            raise CommitTerminal("this request has ended")
        if expected_length != len(self.output):
            raise CommitConflict(f"the record has {len(self.output)} output tokens, not {expected_length}")
        self.committed_from = expected_length
        self.output.extend(token_ids)
        self.finish_reason = finish_reason


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")

RawSpan = tuple[bytes, Sequence[bytes]]
"""A stream entry: id `0-<length after>`, and the pair (field name, packed ids)."""


def keys_of(prefix: str, request_id: str) -> tuple[str, str, str]:
    """The three keys of one request: hash, prompt, stream. The braces are the cluster's hash tag: all three live on one
    node. Raises InvalidRequest when `request_id` could not be told apart from the syntax of a key."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request id must be 1 to 200 of the characters A-Z a-z 0-9 . _ : -", "request_id")
    base = f"{prefix}:{{{request_id}}}"
    return base, base + ":p", base + ":t"


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Ids as bytes, little-endian uint32 each."""
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_ids(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise StoreError("record is damaged: packed ids have a broken length")
    return struct.unpack(f"<{len(packed) // 4}I", packed)


def encode_params(params: SamplingParams) -> str:
    """Sampling parameters as canonical text: equal parameters give equal text, and floats come back bit by bit (repr
    round-trips)."""
    values = {one.name: getattr(params, one.name) for one in dataclasses.fields(params) if one.name != "seed"}
    values |= {
        "logit_bias": sorted(params.logit_bias.items()),
        "allowed_token_ids": None if params.allowed_token_ids is None else sorted(params.allowed_token_ids),
        "stop_token_ids": sorted(params.stop_token_ids),
    }
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def decode_params(text: str, seed: int) -> SamplingParams:
    values: dict[str, Any] = json.loads(text)
    allowed = values["allowed_token_ids"]
    values |= {
        "logit_bias": dict(values["logit_bias"]),
        "allowed_token_ids": None if allowed is None else frozenset(allowed),
        "stop_token_ids": frozenset(values["stop_token_ids"]),
    }
    return SamplingParams(**values, seed=seed)


def encode_fields(record: RequestRecord) -> list[str | int]:
    """The unchanging fields of the hash, flat: name, value, name, value, ..."""
    text = [record.stop_strings, record.skip_special_tokens, record.include_stop_str_in_output]
    fields: dict[str, str | int] = {
        "seed": record.params.seed,
        "params": encode_params(record.params),
        "model": record.model,
        "tokenizer": record.tokenizer_fingerprint,
        "text": json.dumps(text),
        "body": record.body_fingerprint,
        "prompt_length": len(record.prompt_token_ids),
    }
    return [part for field in fields.items() for part in field]


def finish_text(finish_reason: FinishReason | None) -> str:
    return "" if finish_reason is None else finish_reason.value


def decode_record(
    request_id: str, fields: Mapping[bytes, bytes], prompt: bytes, spans: Sequence[RawSpan]
) -> RequestRecord:
    """The record in the server's reply. Raises StoreError when prompt or committed tokens have a gap: a record is whole
    or it is not used."""
    output: list[int] = []
    for entry_id, (_, packed) in spans:
        output.extend(unpack_ids(packed))
        if entry_id != b"0-%d" % len(output):
            raise StoreError("record is damaged: its spans have a gap")
    prompt_ids = unpack_ids(prompt)
    stops, skip_special_tokens, include_stop_str_in_output = json.loads(fields[b"text"])
    if len(output) != int(fields[b"length"]) or len(prompt_ids) != int(fields[b"prompt_length"]):
        raise StoreError("record is damaged: lengths do not agree")
    finish = fields[b"finish"].decode()
    return RequestRecord(
        request_id=request_id,
        epoch=int(fields[b"epoch"]),
        prompt_token_ids=prompt_ids,
        output_token_ids=tuple(output),
        params=decode_params(fields[b"params"].decode(), int(fields[b"seed"])),
        model=fields[b"model"].decode(),
        tokenizer_fingerprint=fields[b"tokenizer"].decode(),
        stop_strings=tuple(stops),
        skip_special_tokens=skip_special_tokens,
        include_stop_str_in_output=include_stop_str_in_output,
        body_fingerprint=fields[b"body"].decode(),
        finish_reason=FinishReason(finish) if finish else None,
    )
