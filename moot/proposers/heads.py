"""A trained recurrent head on the target's last hidden state (moot.model.recurrent_head), inside the verifier.

The state behind the last committed token and that token go in, and each step says one more. All sessions of a verify
step, and all branches of each, take these steps together, so that one step of the head streams its weights once. At
temperature > 0 tokens are drawn with the target's noise of their position (head_draws.py).

Confidence byte: round(255 * p), p the probability of the token in the head's own softmax, at temperature > 0 in that of
the scores that it was drawn by, noise included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moot.config import option
from moot.core.errors import ConfigError
from moot.model.head_steps import head_steps
from moot.model.load import LoadedModel
from moot.model.recurrent_head import RecurrentHead
from moot.model.runner import ModelRunner
from moot.proposers.base import Chain
from moot.proposers.draws import COUPLED, DRAWS, drafting_params
from moot.proposers.head_draws import HeadDraws, Place
from moot.proposers.inside import InsideAsk, InsideDrafter
from moot.proposers.options import ProposerOptions, require
from moot.shipped import locate


@dataclass(frozen=True, kw_only=True)
class HeadsOptions(ProposerOptions):
    path: str = option(help="folder of a head, as `moot train --kind heads` writes it")
    max_tokens: int = option(4, help="tokens of a chain at most")
    rows: int = option(4096, help="most frequent ids that are guessed at all; 0: as many as the head knows")
    min_confidence: float = option(0.0, help="a chain ends before a token less probable than this, all before it too")
    sharpen: float = option(1.0, help="multiplies the logits at temperature > 0; above 1 helps weak heads")
    draws: str = option(COUPLED, help="at temperature > 0: the target's noise, other noise, or none", choices=DRAWS)

    def __post_init__(self) -> None:
        require(self.max_tokens > 0, "max_tokens", "must be positive")
        require(self.rows >= 0, "rows", "must not be negative")
        require(0.0 <= self.min_confidence <= 1.0, "min_confidence", "must be in 0..1")
        require(self.sharpen > 0.0, "sharpen", "must be positive")


@dataclass(slots=True)
class _Row:
    """One chain in the making."""

    ask: InsideAsk
    goal: int
    path: list[int]
    confidences: list[int]
    reach: float
    """Probability of the whole path, by the head."""

    def last_ids(self, count: int) -> list[int]:
        """The latest first; before the begin of the text its first id again, as in training."""
        ids, length = self.ask.token_ids, len(self.ask.token_ids)
        latest = self.path[: -count - 1 : -1]
        return latest + [ids[max(0, length - 1 - back)] for back in range(count - len(latest))]


class HeadsDrafter(InsideDrafter):
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
    def propose(self, asks: Sequence[InsideAsk]) -> list[list[Chain]]:
        if self._options.draws != COUPLED:
            asks = [replace(ask, params=drafting_params(ask.params, self._options.draws)) for ask in asks]
        rows = [_Row(ask, self._goal(ask), [], [], 1.0) for ask in asks]
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
        return [[_chain(row) for row in chains[id(ask)] if row.path] for ask in asks]

    def _goal(self, ask: InsideAsk) -> int:
        room = self._options.context_limit - len(ask.token_ids)
        return max(0, min(ask.num_tokens, self._options.max_tokens, room)) if ask.width > 0 else 0

    def _lengthen(
        self, rows: Sequence[_Row], states: Tensor, chains: dict[int, list[_Row]]
    ) -> tuple[list[_Row], list[int]]:
        """Every row by one token, a first row by as many rows as its ask has chains. Returns the rows that go on, and
        for each the index of its state."""
        logits = self._steps.logits(states)
        places = [Place(row.ask.params, row.ask.history, len(row.ask.token_ids), tuple(row.path)) for row in rows]
        widths = [1 if row.path else row.ask.width for row in rows]
        found = self._draws.draw(logits, places, widths)
        live: list[_Row] = []
        kept: list[int] = []
        for index, (row, drawn) in enumerate(zip(rows, found, strict=True)):
            begins = not row.path
            for token_id, share in drawn:
                reach = row.reach * share
                if not reach >= self._options.min_confidence:
                    # Those after it are less likely, but drawn with noise they need not be: each is looked at.
                    continue
                grown = _Row(row.ask, row.goal, [], [], 1.0) if begins else row
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


def _chain(row: _Row) -> Chain:
    return Chain(tuple(row.path), tuple(row.confidences))
