"""What plain decoding would have taken for a round's tokens: an estimate, so that gain and loss can be seen. Pure."""

from __future__ import annotations

from moot.core.types import Verification

_FOLLOWING = 0.05
"""How fast the usual duration of a plain step follows the last one."""


class PlainTimes:
    """Plain steps that were seen, by how many requests were in them (in powers of two).

    Without drafting, each token of a round would have taken a round of its own: without the draft stage, and with a
    step of one token for each request. Such steps happen in passing (the last token of a text, K = 0) and are measured
    then; a number of requests that never had one is taken to need as long as with its drafts, so that the estimate errs
    towards speculation and a loss that it shows is one.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def estimate(self, verification: Verification, num_tokens: int, verify_seconds: float) -> float:
        """Seconds for `num_tokens`, of a round that waited `verify_seconds` for its verification."""
        forward = verification.forward_us * 1e-6
        requests = verification.batch_requests
        if requests < 1 or forward <= 0:
            return num_tokens * verify_seconds
        size = (requests - 1).bit_length()
        ratio = 1.0
        if verification.batch_prefill_tokens == 0:
            usual = self._seconds.get(size)
            if verification.batch_tokens == requests:
                self._seconds[size] = forward if usual is None else usual + _FOLLOWING * (forward - usual)
            elif usual is not None:
                ratio = min(usual / forward, 1.0)
        # Who waits for a step waits for the drafts of others.
        in_steps = min(forward + verification.queue_us * 1e-6, verify_seconds)
        return num_tokens * (verify_seconds - in_steps * (1.0 - ratio))
