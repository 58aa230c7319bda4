"""The drafter `heads`: a trained recurrent head on the target's last hidden state, attached to the verifier.

The state behind the last committed token and that token go in, and each step says one more. All sessions of a verify
step, and all branches of each, take these steps in one batch, so that one step of the head streams its weights once.

Tokens are chosen among a part of the vocabulary, by the target's rule and noise. Greedy rows take the highest logit.
Sampled rows take the highest of logit / T + G, with the target's own noise G of the position, in single precision:
enough to choose mostly what the target chooses, which is all that a draft is for. Requests with rules of their own
(logit_bias, allowed ids, penalties, min_tokens) are drawn by the sampler itself.

Confidence byte: round(255 * p), p the probability of the token in the head's own softmax, at temperature > 0 in that of
the scores that it was drawn by, noise included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moot.core.errors import ConfigError, RequestPoisoned
from moot.core.noise import position_key
from moot.core.options import option, option_of
from moot.core.sampling import MASKED
from moot.core.types import Proposal, SamplingParams
from moot.drafters.attached.attached_interface import AttachedAsk, AttachedDrafter, ChainOptions
from moot.drafters.attached.head_steps import head_steps
from moot.drafters.attached.recurrent_head import RecurrentHead
from moot.drafters.neural.draft_model import COUPLED, DraftModelOptions, drafting_params
from moot.model.loading.load import LoadedModel
from moot.model.runner import ModelRunner
from moot.model.sampling.logits import gumbel_rows, one_minus_uniform
from moot.model.sampling.sampler import Sampler, has_rules
from moot.shipped import locate

_MOST_OF_NUCLEUS = 128
"""A nucleus of more tokens than this is taken to be the whole vocabulary."""

Drawn = tuple[int, float]
"""A token id and its probability in the head's own softmax; where it was drawn with noise, in that of logit / T + G, so
that of several tokens the one that was drawn first has the highest."""


@dataclass(slots=True)
class _Row:
    """One chain in the making, and so the place at which its next token is drawn."""

    ask: AttachedAsk
    goal: int
    path: list[int] = field(default_factory=list)
    confidences: list[int] = field(default_factory=list)
    reach: float = 1.0
    """Probability of the whole path, by the head."""

    @property
    def params(self) -> SamplingParams:
        return self.ask.params

    @property
    def position(self) -> int:
        return len(self.ask.token_ids) + len(self.path)

    @property
    def width(self) -> int:
        """Tokens to draw: each that comes first begins a chain."""
        return 1 if self.path else self.ask.width

    @property
    def has_rules(self) -> bool:
        """Whether more than temperature and filters decides."""
        return has_rules(self.params, self.ask.history.num_output + len(self.path))

    def last_ids(self, count: int) -> list[int]:
        """The last ids of the chain, the latest first; before the begin of the text its first id again, as in
        training."""
        ids, length = self.ask.token_ids, len(self.ask.token_ids)
        latest = self.path[: -count - 1 : -1]
        return latest + [ids[max(0, length - 1 - back)] for back in range(count - len(latest))]


class HeadDraws:
    """`token_ids` int64 [vocab]: what the columns of the logits stand for; one more column stands for all others."""

    def __init__(self, token_ids: Tensor, vocab_size: int, end_token_ids: frozenset[int], sharpen: float) -> None:
        self._token_ids = token_ids
        self._ids: list[int] = token_ids.tolist()
        self._column_of = {token_id: column for column, token_id in enumerate(self._ids)}
        self._vocab_size = vocab_size
        self._sharpen = sharpen
        self._sampler = Sampler(vocab_size, end_token_ids)

    def draw(self, logits: Tensor, places: Sequence[_Row]) -> list[list[Drawn]]:
        """Per row of `logits`, float32 [n, vocab + 1], the `width` best ids, best first; none of a row that is not
        finite, or where no id is allowed."""
        known = logits[:, :-1]
        count = min(max(place.width for place in places), known.shape[1])
        shares = logits.softmax(1)
        is_hot = any(not place.params.is_greedy for place in places)
        # Greedy rows are ordered by logit as they are by probability.
        scores = self._scores(known, places) if is_hot else shares[:, :-1]
        best, columns = scores.max(1, keepdim=True) if count == 1 else scores.topk(count, 1)
        shares = shares.gather(1, columns) if is_hot else best
        if hot := [row for row, place in enumerate(places) if not place.params.is_greedy and not place.has_rules]:
            # The noise is known: an id far ahead with it is right more often than one that was likely without it.
            drawn = torch.tensor(hot, device=shares.device)
            given_noise = (best[drawn] - scores[drawn].logsumexp(1, keepdim=True)).exp()
            shares = shares.index_copy(0, drawn, given_noise)
        # One transfer of what may lie on a device; columns are below 2^24, and so exact.
        numbers = torch.cat((columns.float(), shares, best), 1).tolist()
        found: list[list[Drawn]] = []
        for index, (row, place) in enumerate(zip(numbers, places, strict=True)):
            if place.has_rules:
                found.append(self._by_sampler(known[index], float(logits[index].logsumexp(0)), place))
                continue
            picks = zip(row[:count], row[count : 2 * count], row[2 * count :], strict=True)
            able = [(self._ids[int(at)], share) for at, share, score in picks if math.isfinite(score + share)]
            found.append(able[: place.width])
        return found

    def _scores(self, known: Tensor, places: Sequence[_Row]) -> Tensor:
        """The scores of which the highest is chosen, [n, vocab]."""
        hot = [row for row, place in enumerate(places) if not place.params.is_greedy and not place.has_rules]
        if not hot:
            return known
        whole = len(hot) == len(places)
        index = torch.tensor(hot, device=known.device)
        rows = known if whole else known[index]
        params = [places[row].params for row in hot]
        factors = torch.tensor([self._sharpen / one.temperature for one in params], device=known.device)
        scaled = (rows - rows.amax(1, keepdim=True)) * factors[:, None]
        drawn = self._filtered(scaled, params) + self._noise([places[row] for row in hot])
        return drawn if whole else known.index_copy(0, index, drawn)

    def _noise(self, places: Sequence[_Row]) -> Tensor:
        """The noise G of every id at each place, float32 [n, vocab]."""
        if self._token_ids.device.type == "cpu":
            # -log u from 1 - u, which is exact where it decides: near 0.
            rows = [one_minus_uniform(one.params.seed, one.position, self._token_ids) for one in places]
            return torch.log1p(torch.stack(rows).neg_()).neg_().log_().neg_()
        keys = torch.tensor([position_key(one.params.seed, one.position) for one in places])
        keys = keys.to(self._token_ids.device)
        return gumbel_rows(keys[:, :1], keys[:, 1:], self._token_ids[None]).float()

    def _filtered(self, scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """`scaled` with -inf where top_k, top_p or min_p leaves an id out; `scaled` [n, vocab], the highest of each row
        0."""
        floors = [math.log(one.min_p) if one.min_p > 0 else MASKED for one in params]
        floor = torch.tensor(floors, device=scaled.device)[:, None]
        most = max((min(one.top_k, scaled.shape[1]) for one in params), default=0)
        if any(one.top_p < 1 for one in params):
            most = max(most, min(_MOST_OF_NUCLEUS, scaled.shape[1]))
        if most:
            values = scaled.topk(most, 1).values
            floor = floor.maximum(_lowest_of_top(values, scaled, params))
        return scaled.masked_fill(scaled < floor, MASKED)

    def _by_sampler(self, known: Tensor, total: float, place: _Row) -> list[Drawn]:
        row = known.new_full((self._vocab_size,), MASKED)
        row[self._token_ids] = known
        history = place.ask.history.with_path(place.path)
        found: list[Drawn] = []
        while len(found) < min(place.width, len(self._ids)):
            try:
                token_id = self._sampler.draft_token(row, place.params, place.position, history, self._sharpen)
            except RequestPoisoned:
                break
            logit = float(known[self._column_of[token_id]]) if token_id in self._column_of else MASKED
            if not math.isfinite(logit):
                # Nothing that the head knows is allowed.
                break
            found.append((token_id, math.exp(logit - total)))
            row[token_id] = MASKED
        return found


def _lowest_of_top(values: Tensor, scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The lowest value that top_k and top_p keep, [n, 1], from the highest `values` [n, most] of `scaled`, ordered."""
    weights = values.exp()
    totals = scaled.exp().sum(1, keepdim=True)
    # Of an id: what the ids before it hold together.
    before = weights.cumsum(1) - weights
    tops = torch.tensor([one.top_p for one in params], device=scaled.device)[:, None]
    kept = (before < tops * totals).sum(1, keepdim=True)
    # A nucleus that goes on past `values` leaves nothing out here.
    is_open = (tops >= 1) | (before[:, -1:] + weights[:, -1:] < tops * totals)
    lowest = values.gather(1, kept.clamp(1, values.shape[1]) - 1)
    by_mass = torch.where(is_open, torch.full_like(lowest, MASKED), lowest)
    counts = [one.top_k if 0 < one.top_k <= values.shape[1] else 0 for one in params]
    ranks = torch.tensor(counts, device=scaled.device)[:, None]
    by_count = values.gather(1, (ranks - 1).clamp_min(0))
    return torch.where(ranks > 0, by_mass.maximum(by_count), by_mass)


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(ChainOptions):
    path: str = option(help="folder of a head, as `moot train --kind heads` writes it")
    rows: int = option(
        4096, help="number of ids that are guessed, the most frequent ones; 0: all that the head knows", minimum=0
    )
    min_confidence: float = option_of(
        ChainOptions,
        "min_confidence",
        help="a chain ends before the token with which its probability as a whole falls below this",
    )
    draws: str = option_of(DraftModelOptions, "draws")


class HeadsDrafter(AttachedDrafter):
    kind = "heads"

    def __init__(self, drafter_id: str, options: HeadsOptions, runner: ModelRunner) -> None:
        """Raises ConfigError for a folder without a head, or with one of another target."""
        self.drafter_id = drafter_id
        self.family = options.family or self.kind
        self._options = options
        loaded = runner.loaded
        head, config = RecurrentHead.load(locate(options.path))
        if 0 < options.rows < head.shape.vocab:
            head = head.chosen(torch.arange(options.rows))
        token_ids = head.get_buffer("token_ids")
        embedding, rows = target_rows(loaded, token_ids)
        problem = _problem_of(head, config, loaded, embedding.shape[1])
        if problem:
            raise ConfigError(f"recurrent head {options.path} does not fit the target: {problem}")
        with torch.inference_mode():
            self._steps = head_steps(head, rows, embedding)
        self._draws = HeadDraws(
            token_ids.to(rows.device), loaded.info.vocab_size, loaded.info.end_token_ids, options.sharpen
        )
        self._ends = loaded.info.end_token_ids
        self._device = rows.device
        self._tokens = head.shape.tokens

    @torch.inference_mode()
    def propose(self, asks: Sequence[AttachedAsk]) -> list[list[Proposal]]:
        if self._options.draws != COUPLED:
            asks = [replace(ask, params=drafting_params(ask.params, self._options.draws)) for ask in asks]
        rows = [_Row(ask, self._goal(ask)) for ask in asks]
        chains: dict[int, list[_Row]] = {id(row.ask): [] for row in rows}
        live = [row for row in rows if row.goal]
        if not live:
            return [[] for _ in asks]
        states = torch.stack([row.ask.state for row in live]).to(self._device).float()
        while live:
            states = self._steps.advance(states, [row.last_ids(self._tokens) for row in live])
            live, kept = self._lengthen(live, states, chains)
            if live and kept != list(range(len(states))):
                states = states[torch.tensor(kept, device=self._device)]
        return [
            [Proposal(tuple(row.path), tuple(row.confidences)) for row in chains[id(ask)] if row.path] for ask in asks
        ]

    def _goal(self, ask: AttachedAsk) -> int:
        room = self._options.context_limit - len(ask.token_ids)
        return max(0, min(ask.num_tokens, self._options.max_tokens, room)) if ask.width > 0 else 0

    def _lengthen(
        self, rows: Sequence[_Row], states: Tensor, chains: dict[int, list[_Row]]
    ) -> tuple[list[_Row], list[int]]:
        """Lengthen every row by one token, a first row by as many rows as its ask has chains. Returns the rows that go
        on, and for each the index of its state."""
        found = self._draws.draw(self._steps.logits(states), rows)
        live: list[_Row] = []
        kept: list[int] = []
        for index, (row, drawn) in enumerate(zip(rows, found, strict=True)):
            begins = not row.path
            for token_id, share in drawn:
                reach = row.reach * share
                if not reach >= self._options.min_confidence:
                    # Those after it are less likely, but drawn with noise they need not be: each is looked at.
                    continue
                grown = _Row(row.ask, row.goal) if begins else row
                grown.path.append(token_id)
                grown.confidences.append(round(255 * share))
                grown.reach = reach
                if begins:
                    chains[id(row.ask)].append(grown)
                if len(grown.path) < grown.goal and token_id not in row.ask.params.ending_token_ids(self._ends):
                    live.append(grown)
                    kept.append(index)
        return live, kept


def target_rows(loaded: LoadedModel, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The target's embedding [ids, state], and its output layer's rows of `token_ids` [n, state].

    Raises ConfigError where the output layer has no such rows.
    """
    model: Any = loaded.model
    embedding = model.get_input_embeddings().weight.detach()
    if int(token_ids.max()) >= min(loaded.num_logits, loaded.info.vocab_size):
        raise ConfigError("the head guesses ids that the target does not have")
    token_ids = token_ids.to(embedding.device)
    weight = model.get_output_embeddings().weight
    if weight.device.type != "meta":
        return embedding, weight.detach()[token_ids]
    if loaded.decoder is None or loaded.decoder.head.has_bias:
        raise ConfigError("the target's output layer is more than a product")
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        return embedding, embedding[token_ids]
    # Its weights are packed: products with unit vectors give them back, bit by bit.
    unit = torch.eye(loaded.decoder.head.inputs, dtype=embedding.dtype)
    return embedding, loaded.decoder.head(unit).T[token_ids].to(embedding.dtype).contiguous()


def _problem_of(head: RecurrentHead, config: dict[str, Any], loaded: LoadedModel, width: int) -> str | None:
    if head.shape.state != width:
        return f"it reads {head.shape.state} numbers, the target's states have {width}"
    theirs = config.get("tokenizer_fingerprint")
    if theirs not in (None, loaded.info.tokenizer_fingerprint):
        return f"it was made for tokenizer {theirs}, the target has {loaded.info.tokenizer_fingerprint}"
    return None
