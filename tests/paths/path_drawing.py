"""Cases of the path-equality suite, each drawn from its number alone: a system that serves, and a request to it. Pure.

A system is a target with the drafters inside it, a drafter set of 1 to 5 drafters, and a router's settings. Cases in a
row share one, so that they are verified together; a request's text must not depend on its neighbours.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from moot.core.speculation.drafter_selection import SELECTIONS
from moot.core.speculation.length import LENGTHS
from moot.core.voting.draft_trie import SHAPES
from moot.core.voting.voting import POLICIES
from moot.core.voting.weights import WEIGHTS

CASES_PER_SYSTEM = 10
END_ID = 258
VOCAB_SIZE = 259
PRINTABLE = (*range(0x20, 0x7F), END_ID)

T = TypeVar("T")


@dataclass(frozen=True)
class TargetSpec:
    """A tiny random model and the drafters inside its verifier. `context`: of the model, which for the families with a
    decoder of ours costs time at start; `max_model_len`: the verifier's own limit, 0: the model's."""

    family: str
    dtype: str
    attached: tuple[str, ...] = ()
    context: int = 2048
    max_model_len: int = 0

    @property
    def name(self) -> str:
        return f"{self.family}-{self.dtype}"

    @property
    def limit(self) -> int:
        return self.max_model_len or self.context


TARGETS = (
    TargetSpec("llama", "float32", ("heads", "lookahead")),
    TargetSpec("llama", "bfloat16", ("self", "lookahead"), context=600),
    TargetSpec("qwen3", "bfloat16", ("heads", "self"), context=250),
    TargetSpec("gemma2", "float32", ("lookahead",)),
    TargetSpec("gpt_neox", "bfloat16", ("heads",)),
    TargetSpec("gemma3_text", "bfloat16", ("heads", "lookahead")),
    TargetSpec("mistral", "float32", ("lookahead",), max_model_len=560),
    TargetSpec("phi3", "bfloat16", ("self",), context=250),
)

LOCAL = ("prompt_lookup", "suffix", "suffix_store", "ngram", "ngram_table", "recycling", "recycling_shared")
"""In the router's process."""
STAGES = {"neural": 1, "neural_two": 2, "neural_three": 3}
"""Draft models in pods of their own, by how many stages they have."""
WILD = ("random", "empty", "outside", "too_long", "too_many", "confidences", "failing", "protocol")
MODELS = (*STAGES, "superposed")
"""All that have a draft model."""
PODS = (*MODELS, "knowing", *WILD)
OF_REQUESTS = ("prediction", "sibling")
INSIDE = ("heads", "lookahead", "self")
ALL_DRAFTERS = (*LOCAL, *PODS, *OF_REQUESTS, *INSIDE)

PATIENT, USUAL, HASTY = (10_000.0, 10_000.0), (50.0, 250.0), (0.5, 2.0)
"""Milliseconds: soft and hard deadline of a vote."""


@dataclass(frozen=True)
class System:
    """`settings`: fields of RouterConfig."""

    number: int
    target: TargetSpec
    drafter_set: tuple[str, ...]
    settings: dict[str, Any]

    @property
    def drafters(self) -> tuple[str, ...]:
        """All that a request can name."""
        return (*self.drafter_set, *self.target.attached, *OF_REQUESTS)


@dataclass(frozen=True)
class Case:
    """`body`: of the request, as a client would send it. `ending`: how the text is made to end early, seen from the
    text that there is without; `place`: where, as a part of that text. `prediction`: the text's places, as parts of
    it, at which the client's prediction is wrong; None: none is sent. `is_staggered`: the first choice is done before
    the others begin."""

    number: int
    system: System
    body: dict[str, Any]
    ending: str
    place: float
    prediction: tuple[float, ...] | None
    is_staggered: bool

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body

    @property
    def drafters(self) -> tuple[str, ...]:
        """Those that may have a vote in it."""
        ours = tuple(self.body.get("drafters", self.system.drafters))
        brought = (self.prediction is not None, self.body["n"] > 1)
        absent = {name for name, is_there in zip(OF_REQUESTS, brought, strict=True) if not is_there}
        return tuple(name for name in ours if name not in absent)


def draw_system(number: int) -> System:
    draw = random.Random(f"system {number}")
    soft_ms, hard_ms = _weighted(draw, {PATIENT: 8, USUAL: 1, HASTY: 1})
    # Those that may be right more often than those that never are.
    drawn = draw.sample((*LOCAL, *MODELS, *LOCAL, *MODELS, *WILD), draw.randint(1, 5))
    if len(drawn) < 2 or draw.random() < 0.4:
        # It alone is right at will: without it hardly any draft is long.
        drawn = ["knowing", *drawn[:4]]
    drafter_set = list(dict.fromkeys(drawn))
    draw.shuffle(drafter_set)
    settings: dict[str, Any] = {
        "vote": draw.choice(tuple(POLICIES)),
        "shape": draw.choice(tuple(SHAPES)),
        "weights": draw.choice(tuple(WEIGHTS)),
        "length": draw.choice(LENGTHS),
        "asks": draw.choice(SELECTIONS),
        "cascade": _weighted(draw, {1.0: 3, 0.6: 1, 0.2: 1}),
        "num_speculative_tokens": _weighted(draw, {8: 8, 6: 3, 4: 2, 2: 1, 1: 1, 0: 1}),
        "max_draft_tokens": _weighted(draw, {16: 4, 32: 2, 8: 2, 4: 1, 1: 1}),
        "proposal_width": _weighted(draw, {1: 3, 2: 2, 3: 2, 4: 1}),
        "num_top_candidates": _weighted(draw, {8: 3, 3: 1, 1: 1}),
        "vote_soft_deadline_ms": soft_ms,
        "vote_hard_deadline_ms": hard_ms,
        "vote_quorum": draw.choice((0.0, 0.5, 1.0)),
        # Either no drafter is ever sent away, however badly it behaves, or every bad one is at once and comes back.
        "ejection_failures": draw.choice((1_000_000, 1_000_000, 2)),
        "eject_s": 0.05,
        "max_buffered_commits": draw.choice((1, 64)),
    }
    return System(number, TARGETS[number % len(TARGETS)], tuple(drafter_set), settings)


def draw_case(number: int) -> Case:
    system = draw_system(number // CASES_PER_SYSTEM)
    draw = random.Random(f"case {number}")
    is_chat = draw.random() < 0.25
    body: dict[str, Any] = {"model": "tiny", "seed": draw.getrandbits(62)}
    if is_chat:
        # Short enough for the shortest context, template included.
        body["messages"] = [{"role": "user", "content": _text(draw)[:40]}]
        if draw.random() < 0.3:
            body["messages"].insert(0, {"role": "system", "content": _text(draw)[:40]})
    else:
        body["prompt"] = _prompt(draw, system.target.limit)
    max_tokens = draw.choice((1, 3, 6, 10, 16, 24, 32, 32))
    body |= {"max_tokens": max_tokens, "n": _weighted(draw, {1: 5, 2: 2, 3: 1})} | _sampling(draw)
    if draw.random() < 0.3:
        room = system.target.limit - len(body["prompt"]) if isinstance(body.get("prompt"), list) else max_tokens
        body["min_tokens"] = min(draw.randint(0, max_tokens), room)
    if draw.random() < 0.5:
        body |= (
            {"logprobs": True, "top_logprobs": draw.choice((0, 3))} if is_chat else {"logprobs": draw.choice((0, 4))}
        )
    if draw.random() < 0.55:
        body["num_speculative_tokens"] = draw.choice((0, 1, 2, 3, 4, 5, 6, 7, 8, 8))
    if draw.random() < 0.5:
        count = draw.randint(1, min(5, len(system.drafters)))
        body["drafters"] = draw.sample(system.drafters, count)
    if draw.random() < 0.2:
        body["cache_salt"] = "salt"
    return Case(
        number=number,
        system=system,
        body=body,
        ending=_weighted(draw, {"none": 12, "stop_token": 3, "stop_string": 4, "end_likely": 2}),
        place=draw.random(),
        prediction=tuple(draw.random() for _ in range(draw.randint(0, 2))) if draw.random() < 0.35 else None,
        is_staggered=draw.random() < 0.5,
    )


FIXED_TEXTS = (
    *("a", "\n", "The ", "hello hello hello hello", "0101010101010101"),
    "Grüße, Привет, 你好, \U0001f600\U0001f680",
)
"""Prompts of many cases, for drafters that live from what the target has said before."""


def _text(draw: random.Random) -> str:
    kind = draw.random()
    if kind < 0.5:
        return draw.choice(FIXED_TEXTS)
    if kind < 0.7:
        part = "".join(chr(draw.randrange(0x20, 0x7F)) for _ in range(draw.randint(1, 7)))
        return (part * draw.randint(1, 12))[:80]
    if kind < 0.8:
        return "".join(draw.choice("aé€\U0001f40d\u0301 ") for _ in range(draw.randint(1, 20)))
    return "".join(chr(draw.randrange(0x20, 0x7F)) for _ in range(draw.randint(1, 90)))


def _prompt(draw: random.Random, limit: int) -> str | list[int]:
    """Text, or token ids: any of the vocabulary, now and then so many that they need a second page of the cache or that
    the context ends soon after them."""
    if draw.random() < 0.7:
        return _text(draw)
    count = _weighted(draw, {1: 3, 2: 3, 9: 6, 40: 6, 150: 2, 505: 1, 545: 1})
    return [draw.randrange(VOCAB_SIZE) for _ in range(min(count, limit - draw.randint(1, 12)))]


def _sampling(draw: random.Random) -> dict[str, Any]:
    def maybe(chance: float) -> bool:
        return draw.random() < chance

    fields: dict[str, Any] = {"temperature": draw.choice((0.0, 0.0, 0.0, 0.3, 0.7, 1.0))}
    if maybe(0.2):
        fields["top_k"] = draw.choice((1, 3, 20, 200))
    if maybe(0.2):
        fields["top_p"] = draw.choice((0.3, 0.9, 0.99))
    if maybe(0.15):
        fields["min_p"] = draw.choice((0.02, 0.2))
    if maybe(0.2):
        fields["repetition_penalty"] = draw.choice((1.3, 2.0, 0.8))
    if maybe(0.15):
        fields["presence_penalty"] = draw.choice((0.7, -0.5))
    if maybe(0.15):
        fields["frequency_penalty"] = draw.choice((0.4, -0.6))
    if maybe(0.2):
        fields["logit_bias"] = {str(draw.randrange(VOCAB_SIZE)): round(draw.uniform(-8, 8), 3) for _ in range(5)}
    if maybe(0.2):
        fields["allowed_token_ids"] = list(PRINTABLE)
    elif maybe(0.25):
        # So few that the text repeats itself, and drafters that look back are often right.
        fields["allowed_token_ids"] = draw.sample(PRINTABLE, draw.randint(2, 8))
    if maybe(0.3):
        fields["ignore_eos"] = True
    if maybe(0.2):
        fields["include_stop_str_in_output"] = True
    if maybe(0.1):
        fields["skip_special_tokens"] = False
    return fields


def _weighted(draw: random.Random, weights: dict[T, int]) -> T:
    options: Sequence[T] = tuple(weights)
    return draw.choices(options, tuple(weights.values()))[0]
