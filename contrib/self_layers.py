"""The target drafts for itself with a part of its layers (self-speculative decoding, arXiv 2309.08168; SWIFT).

A draft token goes through the kept layers alone. They read the session's own keys and values of committed tokens, which
the whole target has left there, so that nothing is kept and nothing is prefilled. What drafting leaves in the slots
after them is overwritten by the next step. Which layers to leave out was measured by
bench/self_layers.py, until 189fbca.

Confidence byte: round(255 * p), p the probability of the token in the draft's own softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moot.core.errors import ConfigError
from moot.core.options import option
from moot.core.types import Proposal
from moot.drafters.attached.attached_interface import AttachedAsk, AttachedDrafter, ChainOptions
from moot.drafters.attached.kinds import AttachedKind
from moot.drafters.interface import require
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.model.sampling.sampler import Sampler


@dataclass(frozen=True, kw_only=True)
class SelfOptions(ChainOptions):
    skip: str = option(help="layers to leave out, counted from 0: 5+17+4")

    def check_together(self) -> None:
        require(all(part.isdigit() for part in self.skip.split("+")), "skip", "must be layers joined by +")

    @property
    def skipped(self) -> frozenset[int]:
        return frozenset(int(part) for part in self.skip.split("+"))


@dataclass(slots=True)
class _Row:
    ask: AttachedAsk
    cache: KvCache
    length: int
    goal: int
    path: list[int]
    confidences: list[int]


class SelfDrafter(AttachedDrafter):
    """Proposes one chain, whatever the width."""

    kind = "self"

    def __init__(self, drafter_id: str, options: SelfOptions, runner: ModelRunner) -> None:
        """Raises ConfigError where the target's layers cannot be left out one by one."""
        self.drafter_id = drafter_id
        self.family = options.family or self.kind
        self._options = options
        self._runner = runner
        if not runner.can_skip_layers:
            raise ConfigError(f"{runner.info.model}: its layers are driven by its own modules, which go through all")
        count = runner.loaded.kv_shape.num_layers
        self.layers = tuple(index for index in range(count) if index not in options.skipped)
        if not self.layers or max(options.skipped) >= count:
            raise ConfigError(f"drafter {drafter_id}: skip must leave some of the layers 0 to {count - 1}")
        self._sampler = Sampler(runner.info.vocab_size, runner.info.end_token_ids)

    @torch.inference_mode()
    def propose(self, asks: Sequence[AttachedAsk]) -> list[list[Proposal]]:
        rows = [self._row(ask) for ask in asks]
        is_finite = True
        try:
            live = [row for row in rows if row.goal]
            while live and is_finite:
                live, is_finite = self._lengthen(live)
        finally:
            for row in rows:
                if row.goal:
                    row.cache.crop(row.length)
                    if not is_finite:
                        # Their numbers would reach the next step through its mask.
                        row.cache.wipe()
        return [[Proposal(tuple(row.path), tuple(row.confidences))] if row.path else [] for row in rows]

    def _row(self, ask: AttachedAsk) -> _Row:
        if ask.cache is None:
            raise RuntimeError("the session's cache is needed")
        room = self._options.context_limit - len(ask.token_ids)
        goal = max(0, min(ask.num_tokens, self._options.max_tokens, room)) if ask.width > 0 else 0
        if ask.cache.length != len(ask.token_ids) - 1:
            # Its cache has made room for others.
            goal = 0
        return _Row(ask, ask.cache, ask.cache.length, goal, [], [])

    def _lengthen(self, rows: Sequence[_Row]) -> tuple[list[_Row], bool]:
        """One token each; the rows that go on, and whether all numbers are finite."""
        inputs = [SequenceInput(row.cache, [(row.path or row.ask.token_ids)[-1]], None, (0,)) for row in rows]
        logits = torch.cat(self._runner.forward(inputs, layers=self.layers))
        for row in rows:
            row.cache.commit((0,))
        tokens = self._sampler.draft_tokens(
            logits,
            [row.ask.params for row in rows],
            [len(row.ask.token_ids) + len(row.path) for row in rows],
            [row.ask.history.with_path(row.path) for row in rows],
            self._options.sharpen,
        )
        shares = self._sampler.probabilities(logits, [token or 0 for token in tokens])
        ends = self._sampler.end_token_ids
        live: list[_Row] = []
        for row, token, share in zip(rows, tokens, shares, strict=True):
            if token is None or not share >= self._options.min_confidence:
                continue
            row.path.append(token)
            row.confidences.append(round(255 * share))
            if len(row.path) < row.goal and token not in row.ask.params.ending_token_ids(ends):
                live.append(row)
        return live, bool(logits.isfinite().all())


KIND = AttachedKind("self", SelfOptions, SelfDrafter)
