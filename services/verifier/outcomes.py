"""What a step makes of each request in it, and what an exception on the way means."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.acceptance import Walk
from moot.core.errors import RequestPoisoned, is_out_of_memory
from moot.core.types import TokenLogprobs
from services.verifier.commands import FailureCode
from services.verifier.sessions import Session

_log = logging.getLogger("moot.verifier")


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A chunk of the prefix got its KV; nothing to answer yet."""

    session: Session


@dataclass(frozen=True, slots=True)
class Sampled:
    """The session's work is done and its state advanced by `walk`; one entry per output token in the others."""

    session: Session
    walk: Walk
    logprobs: tuple[TokenLogprobs, ...]
    top_candidates: tuple[tuple[int, ...], ...]
    state: Tensor | None = None
    """What the target's output layer was given when it chose the last output token, [width], where that is kept."""
    guess_logits: Tensor | None = None
    """Of the session's guesses, [guesses, vocab], where some were fed."""


@dataclass(frozen=True, slots=True)
class Broken:
    """This session cannot go on."""

    session: Session
    code: FailureCode
    message: str


Outcome = Prefilled | Sampled | Broken


class DeviceLost(RuntimeError):
    """The accelerator's context is gone: nothing in this process can be computed any more."""


def broken(session: Session, error: Exception) -> Broken:
    if isinstance(error, RequestPoisoned):
        return Broken(session, FailureCode.POISONED, str(error))
    if is_out_of_memory(error):
        return Broken(session, FailureCode.NO_MEMORY, "no memory for this request")
    # The text of an unknown error may quote what a user wrote: only its name leaves this process.
    _log.error("a request failed", exc_info=error, extra={"failed_request_id": session.request_id})
    return Broken(session, FailureCode.INTERNAL, f"internal error ({type(error).__name__})")


def is_device_lost(error: Exception) -> bool:
    """Of the accelerator's errors all but a failed allocation, which leaves its context as it was."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)
