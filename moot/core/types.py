"""The nouns of Moot as frozen dataclasses.

Prefix: prompt plus committed output ids. Draft: what is sent to verify, a chain or a tree. Round: propose, vote,
verify, commit. Position t of a token: its index in prompt + output, counted from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

ROOT = -1
"""Parent index of a draft token that follows the committed prefix directly."""

GREEDY_TEMPERATURE = 1e-5
"""Below it, sampling is greedy: the one limit that every path shares."""


class FinishReason(Enum):
    """Why a request ended; the values are those of OpenAI's API."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Everything that, with target and prompt, determines the text. Validated at the router's border.

    `seed` is the seed of this choice: already hashed from the request's seed and the choice index (lossless by
    construction: nothing else feeds the noise). `logprobs`: None for none, else how many alternatives per position.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0: no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and output."""
    presence_penalty: float = 0.0
    """Over output."""
    frequency_penalty: float = 0.0
    """Over output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: frozenset[int] | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    """Tokens that come before the first one that may end the request: end and stop ids are masked until then."""
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    seed: int = 0
    logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before, beyond what the model makes of them."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def ending_token_ids(self, end_token_ids: frozenset[int]) -> frozenset[int]:
        """Ids that end this request: the model's end tokens unless ignored, and the request's own."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | end_token_ids


@dataclass(frozen=True, slots=True)
class Proposal:
    """The proposal of one drafter for what comes after the prefix: a chain of ids, each with one confidence byte (0 to
    255).

    The byte is on the drafter's own scale and only ever binned. Empty ids: the drafter abstains. A drafter leaves
    `drafter_id` empty: the process that holds it puts the name it was configured with. `offset`: tokens that the
    drafter had before these and that were committed meanwhile; the first of these is at that depth of its own.
    """

    token_ids: tuple[int, ...]
    confidences: tuple[int, ...] = ()
    drafter_id: str = ""
    offset: int = 0

    def part(self, begin: int, end: int | None = None) -> Proposal:
        """The proposal's tokens from index `begin` up to, not including, `end`."""
        return Proposal(self.token_ids[begin:end], self.confidences[begin:end], self.drafter_id)

    def after(self, token_ids: Sequence[int]) -> Proposal | None:
        """What is left of the proposal once these were committed; None: it was wrong, or nothing is left."""
        count = len(token_ids)
        if len(self.token_ids) <= count or self.token_ids[:count] != tuple(token_ids):
            return None
        return Proposal(self.token_ids[count:], self.confidences[count:], self.drafter_id, self.offset + count)


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft that is verified: a forest over the prefix. `parents[i]` < i is the parent of token i, or ROOT.

    Siblings carry different ids. A chain is the special case parents = (-1, 0, 1, ...).
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, token_ids: tuple[int, ...]) -> Draft:
        return cls(token_ids, tuple(range(-1, len(token_ids) - 1)))

    def follow(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """How many leading ids lead from the prefix into the draft, node by node, and the last of these nodes."""
        parents, drafted = self.parents, self.token_ids
        parent, node, end = ROOT, 0, len(drafted)
        for count, token in enumerate(token_ids):
            # A node comes after its parent.
            while node < end and (parents[node] != parent or drafted[node] != token):
                node += 1
            if node == end:
                return count, parent
            parent = node
            node += 1
        return len(token_ids), parent

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities of the raw logits at one output position; `rank` 1 is the most likely id."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """The target's answer to a draft, or to an opening (num_accepted 0, one token).

    `output_token_ids`: accepted tokens, then one next token of the target's own unless the request ended inside.
    `batch_prefill_tokens`: tokens of prompts among the step's `batch_tokens`. `top_candidates`: per output token, the
    target's most likely ids at that position (empty unless asked for). `proposals`: for what follows, of drafters
    attached to the verifier (empty unless asked for).
    """

    base_length: int
    num_accepted: int
    output_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    top_candidates: tuple[tuple[int, ...], ...] = ()
    proposals: tuple[Proposal, ...] = ()
    num_cached_tokens: int = 0
    queue_us: int = 0
    forward_us: int = 0
    batch_requests: int = 0
    batch_tokens: int = 0
    inside_us: int = 0
    """What making `proposals` took the whole step, beyond `forward_us`."""
    batch_prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the model behind an address. `context_limit` counts prompt plus output tokens."""

    model: str
    revision: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_limit: int
    end_token_ids: frozenset[int] = frozenset()
