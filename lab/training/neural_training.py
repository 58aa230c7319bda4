"""Trains a small Llama of its own, which sees the text alone, to say what the target says.

An ordinary model folder with the target's ids, whose input and output layers are one table: the target's own, squeezed
to the width along its principal directions, is where training begins. All ids are in the table, because a reader of
text has to be fed any of them; each step learns the frequent ids and a sample of the others as outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from lab.training.card import copy_tokenizer
from lab.training.dataset import ANSWERS, Starts, TrainingText, is_written
from lab.training.fit import FitPlan, fit
from lab.training.measure import MOST_MEASURED, TokenStream, divergence, from_single, report
from lab.training.teacher import Teacher

_HEAD_DIM = 64
_ROWS_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class NeuralRecipe:
    """`window`: tokens of a stretch, `batch`: stretches of a step; `vocab`: frequent ids that are learned in every
    step, `sampled`: others."""

    width: int = 192
    layers: int = 2
    vocab: int = 12_288
    sampled: int = 2_048
    passes: float = 6.0
    window: int = 128
    batch: int = 16
    rate: float = 3e-3
    seed: int = 0


class NeuralTrainer:
    title = "Small Llama"
    what = "An independent draft model for the kind `neural`: it sees token ids alone, and has the target's tokenizer."

    def __init__(self, teacher: Teacher, text: TrainingText, recipe: NeuralRecipe) -> None:
        self.teacher, self.text, self.recipe = teacher, text, recipe
        self._frequent = torch.from_numpy(text.frequent_ids(recipe.vocab))
        rare = torch.ones(teacher.info.vocab_size, dtype=torch.bool)
        rare[self._frequent] = False
        self._rare = rare.nonzero()[:, 0]
        self.model = make_model(teacher, recipe)
        self._starts = Starts(text, 0, recipe.window, 1, recipe.seed, within=False)
        positions = sum(int(is_written(shard.roles[row]).sum()) for shard, row in text.rows(held_out=False))
        steps = max(1, round(recipe.passes * positions / (recipe.batch * recipe.window)))
        self.plan = FitPlan(steps, recipe.rate, weight_decay=0.02)

    @property
    def facts(self) -> dict[str, Any]:
        return {"recipe": asdict(self.recipe), "steps": self.plan.steps, "positions": self.text.num_positions}

    def train(self, folder: Path, facts: Mapping[str, Any], until: float = float("inf")) -> bool:
        return fit(self.model, self.loss, self.plan, folder, facts, until, "neural")

    def loss(self, step: int) -> Tensor:
        window = self._starts.batch(step, self.recipe.batch)
        written = torch.from_numpy(is_written(window.roles[:, 1:].numpy())).flatten()
        dtype = self.teacher.rows.dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            states = self.model.model(input_ids=window.token_ids, use_cache=False).last_hidden_state
        states = states[:, :-1].flatten(0, 1)[written].float()
        generator = np.random.default_rng((self.recipe.seed, 1, step))
        count = min(self.recipe.sampled, len(self._rare))
        ids = torch.cat((self._frequent, self._rare[torch.from_numpy(generator.permutation(len(self._rare))[:count])]))
        return divergence(
            states,
            torch.nn.functional.embedding(ids, self.model.get_input_embeddings().weight),
            window.states[:, :-1].flatten(0, 1)[written].to(dtype),
            self.teacher.rows[ids],
        )

    def save(self, folder: Path, facts: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.model.to(torch.bfloat16).save_pretrained(folder)
        copy_tokenizer(folder, self.teacher.folder, self.teacher.tokenizer)

    @torch.inference_mode()
    def measure(self) -> dict[str, float]:
        """Acceptance on held-out rows."""
        streams: list[TokenStream] = []
        measured = 0
        rows = self.model.get_input_embeddings().weight[: self.teacher.info.vocab_size]
        for context, roles, _ in self.text.contexts():
            ids = torch.from_numpy(context)
            states = self.model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            best = torch.cat([(part @ rows.T).argmax(1) for part in states.split(_ROWS_AT_ONCE)])
            matches = np.zeros(len(ids), np.bool_)
            matches[:-1] = (best[:-1] == ids[1:]).numpy()
            streams.append(TokenStream(roles, from_single(matches)))
            measured += int(np.isin(roles, ANSWERS).sum())
            if measured >= MOST_MEASURED:
                break
        return report(streams)


def make_model(teacher: Teacher, recipe: NeuralRecipe) -> Any:
    """Random layers, and a table that is the target's own as far as its principal directions go."""
    heads = max(1, recipe.width // _HEAD_DIM)
    ends = sorted(teacher.info.end_token_ids)
    config = transformers.LlamaConfig(
        vocab_size=len(teacher.embedding),
        hidden_size=recipe.width,
        intermediate_size=3 * recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else 1,
        head_dim=recipe.width // heads,
        max_position_embeddings=teacher.info.context_limit,
        tie_word_embeddings=True,
        bos_token_id=teacher.tokenizer.bos_token_id,
        eos_token_id=ends[0] if len(ends) == 1 else ends,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: Any = transformers.LlamaForCausalLM(config)
    table = teacher.embedding.float()
    # What all rows have in common says nothing, and would drown the rest in the first norm.
    table = table - table.mean(0)
    _, directions = torch.linalg.eigh(table.T @ table)
    # By rising eigenvalue; a direction's sign does not matter.
    squeezed = table @ directions[:, -recipe.width :].flip(1)
    # Rows of length 1 make the first logits small, whatever the target's scale.
    squeezed /= squeezed.norm(dim=1).mean()
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()[:, : squeezed.shape[1]].copy_(squeezed)
    return model
