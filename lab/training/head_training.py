"""Trains a recurrent head to say what the target says, several steps from each state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.training.dataset import ANSWERS, Starts, TrainingText, Window
from lab.training.fit import FitPlan, fit
from lab.training.measure import LONGEST, MOST_MEASURED, TokenStream, divergence, leading, report
from lab.training.teacher import Teacher
from moot.drafters.attached.recurrent_head import RecurrentHead, RecurrentHeadShape, embed


@dataclass(frozen=True, slots=True)
class HeadRecipe:
    """`depths`: steps from each state that are learned, each counting `decay` times the one before; `passes`: over the
    text; `batch`: states of a step."""

    width: int = 1024
    vocab: int = 12_288
    tokens: int = 2
    depths: int = 4
    decay: float = 0.8
    passes: float = 3.0
    batch: int = 512
    rate: float = 2e-3
    seed: int = 0


class HeadTrainer:
    def __init__(self, teacher: Teacher, text: TrainingText, recipe: HeadRecipe) -> None:
        self.teacher, self.text, self.recipe = teacher, text, recipe
        token_ids = torch.from_numpy(text.frequent_ids(recipe.vocab))
        shape = RecurrentHeadShape(teacher.state, recipe.width, len(token_ids), recipe.tokens)
        self.head = RecurrentHead(shape, token_ids)
        generator = torch.Generator().manual_seed(recipe.seed)
        # Starts near the identity: the target's own guess for the token that it has just been given.
        torch.nn.init.normal_(self.head.inward.weight, std=0.03, generator=generator)
        torch.nn.init.normal_(self.head.outward.weight, std=0.01, generator=generator)
        self.rows = teacher.rows[token_ids].contiguous()
        self._before = max(0, recipe.tokens - 2)
        self._starts = Starts(text, self._before, recipe.depths + 1, 2, recipe.seed, within=True)
        self.plan = FitPlan(max(1, round(recipe.passes * len(self._starts) / recipe.batch)), recipe.rate)

    title = "Recurrent head"
    what = (
        "Guesses the tokens after the next one from the target's last hidden state"
        " (`moot.drafters.attached.recurrent_head`). Its output rows are the target's own and are not in the file."
    )

    @property
    def facts(self) -> dict[str, Any]:
        return {
            "recipe": asdict(self.recipe),
            "steps": self.plan.steps,
            "positions": self.text.num_positions,
            "states": len(self._starts),
        }

    def train(self, folder: Path, facts: Mapping[str, Any], until: float = float("inf")) -> bool:
        return fit(self.head, self._loss, self.plan, folder, facts, until, "heads")

    def _loss(self, step: int) -> Tensor:
        return self.loss(self._starts.batch(step, self.recipe.batch))

    def loss(self, window: Window) -> Tensor:
        """Mean divergence over the depths, of starts that lie at `before` in the window."""
        at, recipe = self._before, self.recipe
        states = window.states[:, at].float()
        total, weights = torch.zeros(()), 0.0
        for depth in range(1, recipe.depths + 1):
            states = self.head.advance(states, self._embedded(window.token_ids, at + depth))
            weight = recipe.decay ** (depth - 1)
            total = total + weight * divergence(
                states,
                self.rows,
                window.states[:, at + depth].to(self.rows.dtype),
                self.rows,
                self.head.bias,
                self.head.other,
                window.log_totals[:, at + depth],
            )
            weights += weight
        return total / weights

    def _embedded(self, token_ids: Tensor, last: int) -> Tensor:
        """token_ids [n, length]: the last ones up to column `last`; before the begin the first one again."""
        columns = [max(0, last - back) for back in range(self.recipe.tokens)]
        return embed(self.teacher.embedding, token_ids[:, columns])

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        info = self.teacher.info
        own = {"target": info.model, "revision": info.revision, "tokenizer_fingerprint": info.tokenizer_fingerprint}
        # Trained in the order of ids, saved in that of their frequency: the first ones are the most useful.
        columns = np.searchsorted(self.head.get_buffer("token_ids").numpy(), self.text.by_frequency(self.recipe.vocab))
        self.head.chosen(torch.from_numpy(columns)).save(folder, {**own, "training": dict(facts)})

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """Acceptance on held-out rows."""
        streams: list[TokenStream] = []
        measured = 0
        for ids, roles, states in self.text.contexts():
            streams.append(TokenStream(roles, self._right(torch.from_numpy(ids), states, roles)))
            measured += int(np.isin(roles, ANSWERS).sum())
            if measured >= MOST_MEASURED:
                break
        return report(streams)

    def _right(self, ids: Tensor, states: Tensor, roles: np.ndarray) -> np.ndarray:
        """[positions]: after position p, whose own state is not known yet, how many guesses in a row are right."""
        length = len(ids)
        starts = torch.from_numpy(np.flatnonzero(np.isin(roles[2:], ANSWERS)))
        right = np.zeros(length, np.int64)
        if not len(starts):
            return right
        now, matches = states[starts].float(), np.zeros((len(starts), LONGEST), np.bool_)
        for depth in range(1, LONGEST + 1):
            last = (starts + depth).clamp_max(length - 1)
            columns = torch.stack([(last - back).clamp_min(0) for back in range(self.recipe.tokens)], 1)
            now = self.head.advance(now, embed(self.teacher.embedding, ids[columns]))
            best = self.head.logits(now, self.rows)[:, :-1].argmax(1)
            target = starts + depth + 1
            found = self.head.get_buffer("token_ids")[best] == ids[target.clamp_max(length - 1)]
            matches[:, depth - 1] = (found & (target < length)).numpy()
        right[starts.numpy() + 1] = leading(matches)
        return right
