"""The tree of exceptions. One interceptor (gRPC) and one handler (HTTP) map it to codes; nothing else does.

MootError
├── ConfigError                a flag, environment variable or file is wrong (exit status 2)
├── InvalidRequest             the caller's parameter; carries `param`            400 INVALID_ARGUMENT
│   ├── ContextLengthExceeded  prompt + output do not fit                         400
│   └── BodyTooLarge                                                             413
├── ModelNotFound                                                                404 NOT_FOUND
├── Unauthenticated                                                              401 UNAUTHENTICATED
├── RateLimited                the caller is over its limit; `retry_after_s`      429 RESOURCE_EXHAUSTED
├── NoCapacity                 nobody can serve it now; `retry_after_s`           503 UNAVAILABLE
│   ├── Draining               this pod is going away
│   └── OutOfMemory            not even this request alone found memory
├── DeadlineExceeded           a wait reached its bound                           504 DEADLINE_EXCEEDED
├── PeerError                  about another pod                                  503 UNAVAILABLE
│   ├── PeerLost               stream broken, heartbeats missed or unprogressing
│   ├── PeerRefused            another tokenizer, model or certificate than asked; never used
│   └── PeerForbidden          its certificate says another role or installation  PERMISSION_DENIED
├── SessionError               one session, others go on
│   ├── UnknownSession         open it again
│   └── RequestPoisoned        the target's numbers are not finite for it         500 INTERNAL
├── ModelRefused               a model whose attention cannot be driven, named
└── StoreError                 the record of a request                            503 UNAVAILABLE
    ├── StoreUnavailable       Redis is down, slow or full
    ├── CommitFenced           another owner has claimed the request
    ├── CommitConflict         the record has another length than expected
    ├── CommitTerminal         the record has ended
    ├── LeaseHeld              its owner may still be alive; `retry_after_s`
    └── RecordNotFound         never written, or its time to live is over

Policies by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar


class MootError(Exception):
    """Base of all errors that Moot raises on purpose. The message is fit to be shown to a caller: no token, no key."""


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
    """`shortage`: which of the caller's limits, one of metrics.SHORTAGES."""

    def __init__(self, message: str, retry_after_s: float = 1.0, shortage: str = "other") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.shortage = shortage


class NoCapacity(MootError):
    """`shortage`: what there is too little of, one of metrics.SHORTAGES."""

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
    pass


class PeerLost(PeerError):
    pass


class PeerRefused(PeerError):
    pass


class PeerForbidden(PeerError):
    pass


class SessionError(MootError):
    pass


class UnknownSession(SessionError):
    pass


class RequestPoisoned(SessionError):
    pass


class ModelRefused(MootError):
    pass


class StoreError(MootError):
    pass


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


_MEMORY_WORDS = ("allocate memory", "not enough memory", "out of memory", "bad_alloc", "ALLOC_FAILED")
"""What torch's allocators, its libraries and the system say in errors of no class of their own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed: the same with less may succeed. torch's class is told by its name: who asks may
    have no torch."""
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
