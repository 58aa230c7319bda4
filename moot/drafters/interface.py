"""The interface of every drafter kind, and what the kinds share.

A drafter serves many sessions. For each it is told the prefix (prompt plus committed ids) and, when asked, returns up
to `width` chains of up to K ids that may come next, or abstains. Whatever it returns, the text stays the same.

A command line names drafters as `[id=]kind[:option=value]...` (`parse_entries`). The options of a kind are one frozen
dataclass, closed, built from any mapping of text or typed values (`parse_options`). `ModelFreeDrafter` is the base of
kinds without a model: sessions that follow a prefix, limits, and the check of what they emit. `Kind` is what a kind
hands to the registry.
"""

from __future__ import annotations

import dataclasses
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from moot.config import parse_value
from moot.core.errors import ConfigError
from moot.core.options import Option, Options, option
from moot.core.types import ModelInfo, Proposal, SamplingParams

if TYPE_CHECKING:
    from moot.drafters.request.siblings import Siblings


@dataclass(frozen=True, slots=True)
class DrafterEntry:
    drafter_id: str
    kind: str
    options: dict[str, str]

    def __str__(self) -> str:
        """The entry as `parse_entries` takes it."""
        options = [f":{name}={value}" for name, value in self.options.items()]
        return f"{self.drafter_id}={self.kind}" + "".join(options)


def parse_entries(entries: Iterable[str], flag: str) -> list[DrafterEntry]:
    """Drafter entries, in order. Raises ConfigError naming `flag` and the bad entry, or an id that is given twice."""
    found: list[DrafterEntry] = []
    for entry in entries:
        head, *options = entry.split(":")
        drafter_id, separator, kind = head.partition("=")
        kind = kind if separator else drafter_id
        pairs = [option.partition("=") for option in options]
        if not kind or not drafter_id or any(not separator for _, separator, _ in pairs):
            raise ConfigError(f"{flag}: {entry!r} is not [id=]kind[:option=value]...")
        if any(one.drafter_id == drafter_id for one in found):
            raise ConfigError(f"{flag}: {drafter_id} is named twice")
        found.append(DrafterEntry(drafter_id, kind, {name: value for name, _, value in pairs}))
    return found


SessionT = TypeVar("SessionT")

Candidates = Sequence[Sequence[int]]
"""Per committed id the target's most likely ids there, none for some, or none at all."""


@dataclass(frozen=True, slots=True)
class Ask(Generic[SessionT]):
    """One request for proposals: at most `width` chains of at most `num_speculative_tokens` ids."""

    session: SessionT
    num_speculative_tokens: int
    width: int = 1
    is_ahead: bool = False
    """The answer is not waited for: the ask takes no room that another session holds, and gets nothing where there is
    none."""


@dataclass(frozen=True, slots=True)
class PathAsk(Generic[SessionT]):
    """What a drafter asks of its cheaper stage: ids that may follow the prefix and `path`, which is not committed."""

    session: SessionT
    path: Sequence[int]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestContext:
    """The context that a request brings beside its prefix. Only drafters in the router's process are told of it."""

    prompt_length: int = 0
    """The prefix's ids after so many are output."""
    prediction_token_ids: tuple[int, ...] = ()
    """The likely answer, as the client sent it."""
    siblings: Siblings | None = None
    """What all choices of one prompt share; None where there is but one."""
    choice_index: int = 0
    """Which of them this one is."""


NO_REQUEST_CONTEXT = RequestContext()


class Drafter(ABC, Generic[SessionT]):
    """One drafter kind with its model or tables. Not thread-safe: the drafter's engine calls it from one thread."""

    kind: ClassVar[str]
    family: str
    """Drafters of one family are alike; the vote counts the strongest of them."""
    context_limit: int
    """Prefix length past which it abstains."""
    model_info: ModelInfo | None = None
    """Of kinds with a model: what it is."""
    tokenizer_fingerprint: str = ""
    """Of the tokenizer whose ids its model or tables hold; empty: any, or not known."""
    device: str = "cpu"
    """Where it computes, in torch's words."""
    is_stepwise: ClassVar[bool] = False
    """A chain costs one step per token, shared by all asks of a call, and asking for a longer one after the same prefix
    goes on where the shorter one ended. The engine then takes one step at a time, and drafts ahead."""
    shares_sessions: bool = False
    """What it proposes in a session depends on sessions before it, and not on the prefix alone."""

    @abstractmethod
    def open(self, prefix: Sequence[int], params: SamplingParams) -> SessionT:
        """Start a session whose prefix is `prefix`. `params.seed` is the seed of the target's noise."""

    def open_request(self, prefix: Sequence[int], params: SamplingParams, request_context: RequestContext) -> SessionT:
        """`open`, for the kinds that draft from what a request brings."""
        return self.open(prefix, params)

    def serves(self, request_context: RequestContext) -> bool:
        """Whether the drafter has a vote in a request that brings this context."""
        return True

    @abstractmethod
    def extend(self, session: SessionT, token_ids: Sequence[int], top_candidates: Candidates = ()) -> None:
        """Append committed ids."""

    @abstractmethod
    def propose(self, asks: Sequence[Ask[SessionT]]) -> list[list[Proposal]]:
        """For each ask its chains, best first; an empty list abstains. A failure in one ask must not harm others."""

    def after(self, asks: Sequence[PathAsk[SessionT]]) -> list[tuple[int, ...]]:
        """For each ask at most `num_tokens` ids after prefix and path; none abstains. Sessions stay as they are."""
        return [self.ids_after(ask.session, ask.path, ask.num_tokens) for ask in asks]

    def ids_after(self, session: SessionT, path: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """One answer of `after`: here, the rest of the drafter's own proposal, where that begins with `path`."""
        chains = self.propose([Ask(session, len(path) + num_tokens)])[0]
        ids = chains[0].token_ids if chains else ()
        return ids[len(path) :] if ids[: len(path)] == tuple(path) else ()

    def warm(self, session: SessionT) -> bool:
        """Called while idle after open: do ahead of time some of what the first proposal would have to do.

        Commands wait meanwhile, so it does one bounded piece; True: there is more, call again when idle.
        """
        return False

    def close(self, session: SessionT) -> None:
        """Free what the session holds."""


OptionsT = TypeVar("OptionsT", bound="DrafterOptions")

MAX_VOCAB_SIZE = 1 << 21
"""Ids fit in 21 bits, so that three of them pack exactly into one 64-bit key."""


@dataclass(frozen=True, kw_only=True)
class DrafterOptions(Options):
    """Options of every kind."""

    vocab_size: int = option(
        help="size of the tokenizer's vocabulary; ids at or above it are never proposed",
        minimum=1,
        maximum=MAX_VOCAB_SIZE,
    )
    context_limit: int = option(131_072, help="prefix length in tokens past which the drafter abstains", minimum=1)
    family: str = option("", help="family in the vote: drafters of one family count as alike (empty: the kind's name)")


@dataclass(frozen=True, kw_only=True)
class IndexingOptions(DrafterOptions):
    """Options of the kinds that look into an index of the request's own text."""

    max_indexed_tokens: int = option(
        8192, help="last tokens of the request's own text that are indexed, at most", minimum=2
    )


@dataclass(frozen=True, kw_only=True)
class ConfidenceOptions(DrafterOptions):
    """Options of the kinds that give every token a probability."""

    min_confidence: float = option(
        0.0, help="a chain ends before a token less probable than this, 0 to 1", minimum=0, maximum=1
    )
    sharpen: float = option(1.0, help="factor on the logits at temperature > 0; above 1 helps weak drafters", above=0)


def require(holds: bool, name: str, rule: str) -> None:
    """Raises ConfigError naming the option when the rule does not hold."""
    if not holds:
        raise ConfigError(f"option {name} {rule}")


def parse_options(cls: type[OptionsT], kind: str, options: Mapping[str, object]) -> OptionsT:
    """Build `cls`. Raises ConfigError naming unknown or missing options and the known ones; None means the default."""
    names = {field.name: field for field in dataclasses.fields(cls)}
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(f"unknown option of drafter kind {kind}: {', '.join(unknown)} (known: {', '.join(names)})")
    missing = [name for name, field in names.items() if field.default is dataclasses.MISSING and name not in given]
    if missing:
        raise ConfigError(f"drafter kind {kind} needs option {', '.join(missing)}")
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {
        name: parse_value(value, hints[name], f"option {name} of drafter kind {kind}", names[name].metadata[Option])
        for name, value in given.items()
    }
    return cls(**values)


@dataclass(slots=True)
class PrefixSession:
    """`length`: tokens of the prefix, also of the part that is no longer held."""

    length: int = 0


PrefixSessionT = TypeVar("PrefixSessionT", bound=PrefixSession)


class ModelFreeDrafter(Drafter[PrefixSessionT], Generic[PrefixSessionT]):
    """Base of kinds without a model. A kind defines three methods on its session: make an empty one, append ids, and
    the chains for one ask.

    Past `context_limit` a session drops all that it holds and abstains for good, so its memory is bounded.
    """

    def __init__(self, options: DrafterOptions) -> None:
        self.family = options.family or self.kind
        self.context_limit = options.context_limit
        self.vocab_size = options.vocab_size

    @abstractmethod
    def new_session(self) -> PrefixSessionT:
        """A session with an empty prefix."""

    @abstractmethod
    def append(self, session: PrefixSessionT, token_ids: Sequence[int], top_candidates: Candidates) -> None:
        """Add committed ids to what is held; `session.length` already counts them."""

    @abstractmethod
    def chains(self, session: PrefixSessionT, num_tokens: int, width: int) -> Iterable[Proposal]:
        """Chains of at most `num_tokens` >= 1 ids, best first; more than `width` >= 1 are cut off."""

    def open(self, prefix: Sequence[int], params: SamplingParams) -> PrefixSessionT:
        session = self.new_session()
        self.extend(session, prefix)
        return session

    def extend(self, session: PrefixSessionT, token_ids: Sequence[int], top_candidates: Candidates = ()) -> None:
        session.length += len(token_ids)
        if session.length <= self.context_limit:
            self.append(session, token_ids, top_candidates)
        else:
            self.close(session)

    def propose(self, asks: Sequence[Ask[PrefixSessionT]]) -> list[list[Proposal]]:
        return [self._answer(ask) for ask in asks]

    def _answer(self, ask: Ask[PrefixSessionT]) -> list[Proposal]:
        room = self.context_limit - ask.session.length
        num_tokens = min(ask.num_speculative_tokens, room)
        if num_tokens < 1 or ask.width < 1 or ask.session.length == 0:
            return []
        return valid_chains(self.chains(ask.session, num_tokens, ask.width), self.vocab_size, num_tokens, ask.width)


def valid_chains(chains: Iterable[Proposal], vocab_size: int, num_tokens: int, width: int) -> list[Proposal]:
    """Each chain up to its first id outside 0..vocab_size-1 and to `num_tokens`; no empty one, no doubles."""
    valid: dict[tuple[int, ...], Proposal] = {}
    for chain in chains:
        ids = chain.token_ids[:num_tokens]
        bad = next((index for index, token in enumerate(ids) if not 0 <= token < vocab_size), len(ids))
        if bad and ids[:bad] not in valid:
            valid[ids[:bad]] = chain.part(0, bad)
        if len(valid) == width:
            break
    return list(valid.values())


def window_start(length: int, window: int) -> int:
    """Where the indexed part of a prefix of `length` tokens begins: its last window / 2 to `window` tokens are in it.

    A function of the length alone, so that however a prefix arrived, the same part is indexed. It moves by half a
    window at a time: indexing anew costs a constant per token.
    """
    half = window // 2
    return 0 if length <= window else -(-(length - window) // half) * half


@dataclass(frozen=True, slots=True)
class Kind(Generic[OptionsT]):
    """A drafter kind as the registry knows it: a name, the closed schema of its options and what builds a drafter from
    them."""

    name: str
    options: type[OptionsT]
    build: Callable[[OptionsT], Drafter[Any]]
