"""The tree of exceptions. One table, ERRORS, says what each class is outside the process that raises it.

MootError
├── ConfigError                a flag, environment variable or file is wrong (exit status 2)
├── InvalidRequest             the caller's parameter; carries `param`
│   ├── ContextLengthExceeded  prompt + output do not fit
│   └── BodyTooLarge
├── ModelNotFound
├── Unauthenticated
├── RateLimited                the caller is over its limit; `retry_after_s`
├── NoCapacity                 nothing has room for the request now; `retry_after_s`
│   ├── Draining               this pod is going away
│   └── OutOfMemory            not even this request alone found memory
├── DeadlineExceeded           a wait reached its bound
├── PeerError                  about another pod
│   ├── PeerLost               stream broken, heartbeats missed or unprogressing
│   ├── PeerRefused            another tokenizer, model or certificate than asked; never used
│   └── PeerForbidden          its certificate says another role or installation
├── SessionError               one session, others go on
│   ├── UnknownSession         open it again
│   └── RequestPoisoned        the target's numbers are not finite for it
├── ModelRefused               a model whose attention cannot be driven, named
└── StoreError                 the record of a request
    ├── StoreUnavailable       Redis is down, slow or full
    ├── CommitFenced           another owner has claimed the request
    ├── CommitConflict         the record has another length than expected
    ├── CommitTerminal         the record has ended
    ├── LeaseHeld              its owner may still be alive; `retry_after_s`
    └── RecordNotFound         never written, or its time to live is over

`named` looks a policy up by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar


class MootError(Exception):
    """Base of all errors that Moot raises on purpose. The message is fit to be shown to a caller: no token, no key."""

    retry_after_s: float | None = None
    """Seconds until it is worth another try; None when the same call fails again."""


class ConfigError(MootError):
    pass


class InvalidRequest(MootError):
    """`param` names the field that is wrong, in the words of the API the caller used."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param, "context_length_exceeded")


class BodyTooLarge(InvalidRequest):
    pass


class ModelNotFound(MootError):
    pass


class Unauthenticated(MootError):
    pass


class RateLimited(MootError):
    """The caller is over one of its limits. `shortage`: which one, of metrics.SHORTAGES."""

    def __init__(self, message: str, retry_after_s: float = 1.0, shortage: str = "other") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.shortage = shortage


class NoCapacity(MootError):
    """There is no room for the request now. `shortage`: what there is too little of, one of metrics.SHORTAGES."""

    def __init__(self, message: str, retry_after_s: float = 1.0, shortage: str = "other") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.shortage = shortage


class Draining(NoCapacity):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s, "draining")


class OutOfMemory(NoCapacity):
    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s, "memory")


class DeadlineExceeded(MootError):
    pass


class PeerError(MootError):
    retry_after_s: float | None = 1.0


class PeerLost(PeerError):
    pass


class PeerRefused(PeerError):
    pass


class PeerForbidden(PeerError):
    retry_after_s = None


class SessionError(MootError):
    pass


class UnknownSession(SessionError):
    pass


class RequestPoisoned(SessionError):
    pass


class ModelRefused(MootError):
    pass


class StoreError(MootError):
    retry_after_s = 1.0


class StoreUnavailable(StoreError):
    pass


class CommitFenced(StoreError):
    pass


class CommitConflict(StoreError):
    pass


class CommitTerminal(StoreError):
    pass


class LeaseHeld(StoreError):
    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RecordNotFound(StoreError):
    pass


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What an error of one class is to other processes.

    `http_status` and `http_code` (the body's `code`), `grpc_status` (a name of gRPC's status codes) answer a caller.
    `session_failure`: with which a verifier gives up one session, a name of SessionFailed's codes without `CODE_`; no
    two rows share one. `moves`: why a request that meets it on its verifier goes on with another one, a label of the
    metric `request_moves`; None: it ends.
    """

    http_status: int
    http_code: str
    grpc_status: str
    session_failure: str | None = None
    moves: str | None = None


UNTOLD = "internal_error"
"""The HTTP code of errors whose message is for operators: a caller over HTTP is told no more than this."""

ERRORS: dict[type[MootError], ErrorRow] = {
    MootError: ErrorRow(500, UNTOLD, "INTERNAL"),
    ConfigError: ErrorRow(500, UNTOLD, "INTERNAL"),
    InvalidRequest: ErrorRow(400, "invalid_value", "INVALID_ARGUMENT", "INVALID"),
    ContextLengthExceeded: ErrorRow(400, "context_length_exceeded", "INVALID_ARGUMENT"),
    BodyTooLarge: ErrorRow(413, "body_too_large", "INVALID_ARGUMENT"),
    ModelNotFound: ErrorRow(404, "model_not_found", "NOT_FOUND"),
    Unauthenticated: ErrorRow(401, "invalid_api_key", "UNAUTHENTICATED"),
    RateLimited: ErrorRow(429, "rate_limit_exceeded", "RESOURCE_EXHAUSTED"),
    NoCapacity: ErrorRow(503, "no_capacity", "UNAVAILABLE", "NO_CAPACITY", moves="no_capacity"),
    Draining: ErrorRow(503, "draining", "UNAVAILABLE", "DRAINING", moves="draining"),
    OutOfMemory: ErrorRow(503, "out_of_memory", "UNAVAILABLE", "NO_MEMORY", moves="no_capacity"),
    DeadlineExceeded: ErrorRow(504, "deadline_exceeded", "DEADLINE_EXCEEDED"),
    PeerError: ErrorRow(503, "peer_lost", "UNAVAILABLE", "INTERNAL", moves="internal"),
    PeerLost: ErrorRow(503, "peer_lost", "UNAVAILABLE", moves="lost"),
    PeerRefused: ErrorRow(503, "peer_lost", "UNAVAILABLE", moves="lost"),
    PeerForbidden: ErrorRow(503, "peer_lost", "PERMISSION_DENIED", moves="lost"),
    SessionError: ErrorRow(500, UNTOLD, "ABORTED"),
    UnknownSession: ErrorRow(500, UNTOLD, "ABORTED", "UNKNOWN_SESSION", moves="unknown_session"),
    RequestPoisoned: ErrorRow(500, "request_poisoned", "INTERNAL", "POISONED"),
    ModelRefused: ErrorRow(500, UNTOLD, "INTERNAL"),
    StoreError: ErrorRow(503, "store", "UNAVAILABLE"),
    StoreUnavailable: ErrorRow(503, "store", "UNAVAILABLE"),
    CommitFenced: ErrorRow(503, "store", "UNAVAILABLE"),
    CommitConflict: ErrorRow(503, "store", "UNAVAILABLE"),
    CommitTerminal: ErrorRow(503, "store", "UNAVAILABLE"),
    LeaseHeld: ErrorRow(503, "store", "UNAVAILABLE"),
    RecordNotFound: ErrorRow(503, "store", "UNAVAILABLE"),
}
"""One row for each class of this module."""

SESSION_FAILURES = {row.session_failure: kind for kind, row in ERRORS.items() if row.session_failure}
MOVING = tuple(kind for kind, row in ERRORS.items() if row.moves)


def row_of(kind: type[BaseException]) -> ErrorRow:
    """The row of an error: that of its class or of its nearest base; that of MootError for errors that are not
    Moot's."""
    return next((ERRORS[base] for base in kind.__mro__ if base in ERRORS), ERRORS[MootError])


_MEMORY_WORDS = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "ALLOC_FAILED")
"""What torch's allocators, its libraries and the system say in errors of no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed: the same with less may succeed. torch's class is told by its name: the process
    that asks may have no torch."""
    if isinstance(error, NoCapacity | MemoryError):
        return True
    if any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | OSError) and any(word in str(error) for word in _MEMORY_WORDS)


T = TypeVar("T")


def named(what: str, name: str, choices: Mapping[str, T]) -> T:
    """`choices[name]`; raises ConfigError with the known names where there is none."""
    if name not in choices:
        raise ConfigError(f"unknown {what} {name!r}; known: {', '.join(choices)}")
    return choices[name]
