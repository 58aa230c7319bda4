"""The costs of a simulated router, and the counts of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.options import part
from moot.core.speculation.collection import CollectionPolicy


@dataclass(frozen=True, slots=True)
class RouterPlan:
    """The costs of a simulated router. `open_s`, `round_s`: CPU of a router for a request's opening and for a round,
    half of it before drafting and half before verifying; `ask_s`: what a round that drafts costs more, half before
    asking and half after; `behind_s`: what follows on asking (learning, counting, record, stream). `network_s`: one way
    between any two processes. The deadlines count from the asking."""

    open_s: float = 0.001
    round_s: float = 0.0002
    ask_s: float = 0.0
    behind_s: float = 0.00015
    network_s: float = 0.0002
    tries: CollectionPolicy = part(CollectionPolicy)
    detect_s: float = 0.01
    """From the loss of a peer to the moment at which its requests go on elsewhere."""
    beside_s: tuple[float, ...] = ()
    """CPU per round of processes that no round waits for (store, client): it matters where cores are shared."""
    answer_s: float = 0.00007
    """Where verifiers never wait, CPU of what a session's step brought, of a question to a drafter, of a draft, and of
    what others may overtake (stream, record, learning)."""
    tell_s: float = 0.000035
    vote_s: float = 0.000105
    later_s: float = 0.00014
    credit: int = 64
    """Tokens that a verifier may commit beyond what the router has heard of."""
    num_speculative_tokens: int | None = None
    """None: the policy decides; n: always n; 0: no drafting."""

    @classmethod
    def of_round(cls, round_s: float, network_s: float, num_speculative_tokens: int | None = None) -> RouterPlan:
        """The CPU of a round by what it is for, about as measured, with and without rounds that are waited for."""
        return cls(
            open_s=round_s,
            round_s=0.6 * round_s,
            behind_s=0.4 * round_s,
            answer_s=0.2 * round_s,
            tell_s=0.1 * round_s,
            vote_s=0.3 * round_s,
            later_s=0.4 * round_s,
            network_s=network_s,
            num_speculative_tokens=num_speculative_tokens,
        )


@dataclass(slots=True)
class Counts:
    """Counts since the last reset. `lengths[k]`: rounds that asked for k tokens; `round_s`, `draft_s`: durations of
    rounds and of their drafting, summed."""

    lengths: dict[int, int]
    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    switches: int = 0
    finished: int = 0
    round_s: float = 0.0
    draft_s: float = 0.0
    late: int = 0
    moves: int = 0
