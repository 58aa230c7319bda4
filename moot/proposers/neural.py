"""A draft model: any causal language model with the target's tokenizer.

All asks share one ragged forward per drafted token. A session's KV cache holds a beginning of prefix + drafted path;
committed ids that leave the path crop it to their longest common prefix, so only what is new is computed. What was
drafted and then committed by others is not drafted again: asking a second time for more tokens goes on where the
first ended. At temperature > 0 tokens are drawn with the target's noise.

Confidence byte: round(255 * p), p the probability of the token in the draft model's own softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moot.config import option
from moot.core.errors import NoCapacity
from moot.core.history import History
from moot.core.types import ROOT, SamplingParams
from moot.model.kv import SequenceCache
from moot.model.load import DTYPES, load_model
from moot.model.runner import ModelRunner, SequenceInput
from moot.model.sampler import Sampler
from moot.proposers.base import Ask, Chain, Proposer
from moot.proposers.options import ProposerOptions, require


@dataclass(frozen=True, kw_only=True)
class NeuralOptions(ProposerOptions):
    vocab_size: int = option(0, help="size of the tokenizer's vocabulary; 0: the model's own tokenizer's")
    context_limit: int = option(0, help="prefix length past which the drafter abstains; 0: the model's limit")
    model: str = option(help="folder or hub id of a causal language model")
    revision: str | None = option(None, help="revision of a hub model")
    device: str = option("auto", help="where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", help="number format of the weights", choices=("auto", *DTYPES))
    num_threads: int | None = option(None, help="torch threads; none: torch's default")
    kv_capacity_tokens: int = option(65_536, help="tokens of KV cache for all sessions together")
    deterministic: bool = option(False, help="proposals that do not depend on batch-mates, bit by bit (slower)")
    min_confidence: float = option(0.0, help="a chain ends before a token less probable than this")
    sharpen: float = option(1.0, help="multiplies the logits at temperature > 0; above 1 helps weak models")
    prefill_chunk: int = option(256, help="tokens of one session fed in one forward")

    def __post_init__(self) -> None:
        require(self.vocab_size >= 0, "vocab_size", "must not be negative")
        require(self.context_limit >= 0, "context_limit", "must not be negative")
        require(self.kv_capacity_tokens > 0, "kv_capacity_tokens", "must be positive")
        require(0.0 <= self.min_confidence <= 1.0, "min_confidence", "must be in 0..1")
        require(self.sharpen > 0.0, "sharpen", "must be positive")
        require(self.prefill_chunk > 0, "prefill_chunk", "must be positive")


@dataclass(slots=True, eq=False)
class NeuralSession:
    """Invariant: the cache holds the KV of the first `cache.length` ids of `tokens` + the ids of `ahead`."""

    params: SamplingParams
    cache: SequenceCache
    tokens: list[int] = field(default_factory=list)
    """The prefix."""
    ahead: list[tuple[int, int]] = field(default_factory=list)
    """Drafted after the prefix: id and confidence byte."""
    stopped: bool = False
    """Nothing can be drafted after `ahead`: too unlikely, not finite, ended, or no capacity."""
    history: History | None = None
    highest_id: int = -1

    def path(self, start: int) -> list[int]:
        """Ids of prefix + drafted path from position `start` on."""
        drafted = [token for token, _ in self.ahead]
        return self.tokens[start:] + drafted if start < len(self.tokens) else drafted[start - len(self.tokens) :]


class NeuralProposer(Proposer[NeuralSession]):
    kind = "neural"
    is_stepwise = True

    def __init__(self, options: NeuralOptions) -> None:
        loaded = load_model(
            options.model, options.device, options.dtype, options.revision, num_threads=options.num_threads
        )
        info = loaded.info
        self.family = options.family or self.kind
        self.vocab_size = min(options.vocab_size or info.vocab_size, info.vocab_size)
        self.context_limit = min(options.context_limit or info.context_limit, info.context_limit)
        self.model_info = replace(info, vocab_size=self.vocab_size, context_limit=self.context_limit)
        self._num_embeddings = loaded.num_embeddings
        self._runner = ModelRunner(loaded, options.kv_capacity_tokens, options.deterministic)
        self.device = self._runner.device.type
        self._sampler = Sampler(self.vocab_size, info.end_token_ids)
        self._min_confidence = options.min_confidence
        self._sharpen = options.sharpen
        self._chunk = options.prefill_chunk
        # Least recently used first: whose cache goes when there is no room.
        self._sessions: dict[int, NeuralSession] = {}

    @property
    def kv_used_tokens(self) -> int:
        return self._runner.pool.used_tokens

    def open(self, prefix: Sequence[int], params: SamplingParams) -> NeuralSession:
        # min_tokens and the penalties over the output need to know where the prompt ends, which no proposal is worth.
        own = replace(params, min_tokens=0, presence_penalty=0.0, frequency_penalty=0.0)
        session = NeuralSession(own, self._runner.new_cache())
        session.history = History(()) if own.has_penalties else None
        self._sessions[id(session)] = session
        self.extend(session, prefix)
        return session

    def extend(
        self, session: NeuralSession, token_ids: Sequence[int], top_candidates: Sequence[Sequence[int]] = ()
    ) -> None:
        if not token_ids:
            return
        followed = 0
        for (drafted, _), token in zip(session.ahead, token_ids, strict=False):
            if drafted != token:
                break
            followed += 1
        if followed < min(len(session.ahead), len(token_ids)):
            session.cache.crop(min(session.cache.length, len(session.tokens) + followed))
            session.ahead = []
        else:
            session.ahead = session.ahead[followed:]
        # What ended the path may still lie ahead; it is found again when it is reached.
        session.stopped = session.stopped and bool(session.ahead)
        session.tokens.extend(token_ids)
        session.highest_id = max(session.highest_id, *token_ids)
        if session.history is not None:
            session.history.append(token_ids)

    def propose(self, asks: Sequence[Ask[NeuralSession]]) -> list[list[Chain]]:
        lengths = [self._room(ask) for ask in asks]
        for ask in asks:
            if ask.is_ahead:
                continue
            self._sessions[id(ask.session)] = self._sessions.pop(id(ask.session))
        chains = [(ask, n) for ask, n in zip(asks, lengths, strict=True) if ask.width == 1 and n]
        self._draft_chains(
            [(ask.session, n) for ask, n in chains], {id(ask.session) for ask, _ in chains if ask.is_ahead}
        )
        branches = self._draft_branches(
            [(ask.session, n, ask.width) for ask, n in zip(asks, lengths, strict=True) if ask.width > 1 and n]
        )
        answers: list[list[Chain]] = []
        for ask, length in zip(asks, lengths, strict=True):
            if length and ask.width > 1:
                answers.append([_chain(path) for path in branches[id(ask.session)] if path])
            else:
                path = ask.session.ahead[:length]
                answers.append([_chain(path)] if path else [])
        return answers

    def warm(self, session: NeuralSession) -> bool:
        """Prefill one chunk of all but the last token."""
        return self._is_usable(session) and bool(self._prefill_chunks([session], [session]))

    def close(self, session: NeuralSession) -> None:
        session.cache.free()
        self._sessions.pop(id(session), None)

    def _is_usable(self, session: NeuralSession) -> bool:
        return 0 < len(session.tokens) < self.context_limit and session.highest_id < self._num_embeddings

    def _room(self, ask: Ask[NeuralSession]) -> int:
        """Tokens to draft; 0: abstain."""
        if ask.width < 1 or ask.num_speculative_tokens < 1 or not self._is_usable(ask.session):
            return 0
        if ask.is_ahead and _num_missing(ask.session) > 0:
            # Its cache has made room for others: what is read again is for an ask.
            return len(ask.session.ahead)
        return min(ask.num_speculative_tokens, self.context_limit - len(ask.session.tokens))

    def _prefill(self, sessions: Sequence[NeuralSession]) -> None:
        """Feed every path up to its last id, in chunks, all sessions together."""
        behind = list(sessions)
        while behind:
            behind = self._prefill_chunks(behind, sessions)

    def _prefill_chunks(self, sessions: Sequence[NeuralSession], busy: Sequence[NeuralSession]) -> list[NeuralSession]:
        """Feed the next chunk of each path, in one forward. Returns those that lack more."""
        work = [
            (session, SequenceInput(session.cache, session.path(session.cache.length)[: min(missing, self._chunk)]))
            for session in sessions
            if (missing := _num_missing(session)) > 0
        ]
        for session, item, logits in self._forward(work, busy):
            if logits is not None:
                session.cache.commit(range(len(item.token_ids)))
        return [session for session, _ in work if _num_missing(session) > 0]

    def _draft_chains(self, goals: Sequence[tuple[NeuralSession, int]], ahead: set[int]) -> None:
        """Lengthen every session's path to its goal, one token a forward. `ahead`: identities of those who give way."""
        while goals := [(s, goal) for s, goal in goals if len(s.ahead) < goal and not s.stopped]:
            asked = [session for session, _ in goals if id(session) not in ahead]
            self._prefill(asked)
            # One that gives way may have lost its cache to an ask by now.
            fit = [s for s, _ in goals if not s.stopped and not (id(s) in ahead and _num_missing(s) > 0)]
            work = [(session, _last_id(session)) for session in fit]
            rows: list[Tensor] = []
            fed: list[NeuralSession] = []
            for session, _, logits in self._forward(work, asked, ahead):
                if logits is not None:
                    session.cache.commit((0,))
                    rows.append(logits)
                    fed.append(session)
            unfed = ahead.difference(map(id, fed))
            goals = [(session, goal) for session, goal in goals if id(session) not in unfed]
            if fed:
                self._choose(torch.cat(rows), fed)

    def _choose(self, logits: Tensor, sessions: Sequence[NeuralSession]) -> None:
        drafted = self._next([(session, session.ahead) for session in sessions], logits)
        for session, entry in zip(sessions, drafted, strict=True):
            if entry is not None:
                session.ahead.append(entry)
            session.stopped = entry is None or self._ends(session, entry[0])

    def _ends(self, session: NeuralSession, token: int) -> bool:
        return token in session.params.ending_token_ids(self._sampler.end_token_ids)

    def _next(
        self, paths: Sequence[tuple[NeuralSession, list[tuple[int, int]]]], logits: Tensor
    ) -> list[tuple[int, int] | None]:
        """The token after each path and its confidence byte; None where the row is not finite or it is too unlikely.

        `logits`: [len(paths), vocab], one row per path.
        """
        tokens: list[int | None] = self._sampler.greedy_rows(logits)
        for index, (session, path) in enumerate(paths):
            if tokens[index] is not None and self._sampler.needs_row(session.params, 0):
                past = session.history
                history = None if past is None else past.with_path([token for token, _ in path])
                (tokens[index],) = self._sampler.draft_tokens(
                    logits[index : index + 1],
                    [session.params],
                    [len(session.tokens) + len(path)],
                    None if history is None else [history],
                    self._sharpen,
                )
        shares = self._sampler.probabilities(logits, [token or 0 for token in tokens])
        return [
            None if token is None or not share >= self._min_confidence else (token, round(255 * share))
            for token, share in zip(tokens, shares, strict=True)
        ]

    def _draft_branches(
        self, goals: Sequence[tuple[NeuralSession, int, int]]
    ) -> dict[int, list[list[tuple[int, int]]]]:
        """Per session up to `width` paths that part at their first token. The first one becomes `ahead`.

        All paths of a session are fed as one tree, whole at each depth: few and short, they cost one forward together.
        """
        sessions = [session for session, _, _ in goals]
        for session in sessions:
            session.cache.crop(min(session.cache.length, max(len(session.tokens) - 1, 0)))
            session.ahead, session.stopped = [], False
        self._prefill(sessions)
        branches = {id(session): self._first_tokens(session, width, sessions) for session, _, width in goals}
        ended = {
            (id(session), index)
            for session, _, _ in goals
            for index, path in enumerate(branches[id(session)])
            if self._ends(session, path[0][0])
        }
        while True:
            work, leaves = [], []
            for session, goal, _ in goals:
                paths = branches[id(session)]
                live = [i for i, path in enumerate(paths) if len(path) < goal and (id(session), i) not in ended]
                if live and not session.stopped:
                    work.append((session, _tree(session.cache, paths, live)))
                    leaves.append(live)
            if not work:
                break
            for (session, _, logits), live in zip(self._forward(work, sessions), leaves, strict=True):
                paths = branches[id(session)]
                if logits is None:
                    continue
                for index, entry in zip(live, self._next([(session, paths[i]) for i in live], logits), strict=True):
                    if entry is not None:
                        paths[index].append(entry)
                    if entry is None or self._ends(session, entry[0]):
                        ended.add((id(session), index))
                session.cache.commit(())
        for session, _, _ in goals:
            paths = branches[id(session)]
            session.ahead = paths[0] if paths else []
            session.stopped |= (id(session), 0) in ended
        return branches

    def _first_tokens(
        self, session: NeuralSession, width: int, busy: Sequence[NeuralSession]
    ) -> list[list[tuple[int, int]]]:
        """The `width` best tokens after the prefix by the draft's own rule, each as the begin of a path."""
        if session.stopped:
            return []
        ((_, _, logits),) = self._forward([(session, _last_id(session))], busy)
        if logits is None:
            return []
        session.cache.commit((0,))
        row = logits.clone()
        paths: list[list[tuple[int, int]]] = []
        for _ in range(min(width, self.vocab_size)):
            (entry,) = self._next([(session, [])], row)
            if entry is None:
                break
            share = self._sampler.probabilities(logits, [entry[0]])[0]
            if not share >= self._min_confidence:
                break
            paths.append([(entry[0], round(255 * share))])
            row[0, entry[0]] = float("-inf")
        return paths

    def _forward(
        self,
        work: Sequence[tuple[NeuralSession, SequenceInput]],
        busy: Sequence[NeuralSession],
        ahead: Collection[int] = (),
    ) -> list[tuple[NeuralSession, SequenceInput, Tensor | None]]:
        """One ragged forward of some of `busy`, the sessions drafted for at present.

        Without room, those `ahead` (identities) go without this time; then others lose their caches; then the last of
        `busy` goes without, whether or not it is in `work`.
        """
        served = list(work)
        results: list[Tensor] = []
        while served:
            try:
                results = self._runner.forward([item for _, item in served])
                break
            except NoCapacity:
                if any(id(session) in ahead for session, _ in served):
                    served = [(session, item) for session, item in served if id(session) not in ahead]
                    continue
                kept = set(map(id, busy))
                idle = next((s for s in self._sessions.values() if id(s) not in kept and s.cache.num_slots), None)
                if idle is None:
                    idle = next(session for session in reversed(busy) if not session.stopped)
                    idle.stopped = True
                    served = [(session, item) for session, item in served if session is not idle]
                idle.cache.free()
        logits = dict(zip((id(session) for session, _ in served), results, strict=True))
        return [(session, item, logits.get(id(session))) for session, item in work]


def _num_missing(session: NeuralSession) -> int:
    """Ids of the path, less its last one, that are not in the cache; 0 where nothing can be drafted after it."""
    return 0 if session.stopped else len(session.tokens) + len(session.ahead) - 1 - session.cache.length


def _last_id(session: NeuralSession) -> SequenceInput:
    """Feeds the end of the path, whose row says what comes next; again where a draft had stopped right behind it."""
    session.cache.crop(min(session.cache.length, len(session.tokens) + len(session.ahead) - 1))
    return SequenceInput(session.cache, session.path(session.cache.length), None, (0,))


def _chain(path: Sequence[tuple[int, int]]) -> Chain:
    return Chain(tuple(token for token, _ in path), tuple(confidence for _, confidence in path))


def _tree(cache: SequenceCache, paths: Sequence[Sequence[tuple[int, int]]], live: Sequence[int]) -> SequenceInput:
    """The paths `live` as one tree over the cache; logits wanted at their ends."""
    token_ids: list[int] = []
    parents: list[int] = []
    ends: list[int] = []
    for index in live:
        parent = ROOT
        for token, _ in paths[index]:
            token_ids.append(token)
            parents.append(parent)
            parent = len(token_ids) - 1
        ends.append(parent)
    return SequenceInput(cache, token_ids, parents, ends)
