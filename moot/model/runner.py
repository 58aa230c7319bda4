"""The runner of a model: one ragged forward pass over the tokens of many requests.

`States` are the target's last hidden states of a pass, as its output layer is given them, for drafters that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from moot.core.types import ModelInfo
from moot.model.cache.contiguous import KvPool, SequenceCache
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput, check_inputs
from moot.model.layout import STEP_ARGUMENT, Segment, Step, num_step_rows, plan_segment
from moot.model.loading.load import LoadedModel
from moot.model.rows import NATURAL, RowRules, numerics_fingerprint, tiled


class States:
    """The hidden states of one runner's last pass. They cost nothing until `start`, and then a reference: nothing is
    copied."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.keeps = False
        self._loaded = loaded
        self._given: Tensor | None = None
        self._counts: list[int] = []
        self._rows: Tensor | None = None

    def start(self) -> None:
        if not self.keeps and self._loaded.decoder is None:
            model: Any = self._loaded.model
            model.get_output_embeddings().register_forward_pre_hook(self._on_output_layer)
        self.keeps = True

    def begin(self, counts: Sequence[int]) -> None:
        """A pass begins; `counts`: logit rows of each input."""
        self._counts, self._rows, self._given = list(counts), None, None

    def keep(self, logit_rows: Sequence[int], rows: Tensor | None = None) -> None:
        """A pass has ended. `rows`: where the pass itself has taken the states of the wanted rows, [rows, width]."""
        if not self.keeps:
            return
        if rows is None and self._loaded.decoder is not None:
            rows = self._loaded.decoder.states
        elif rows is None and self._given is not None:
            given = self._given.reshape(-1, self._given.shape[-1])
            # A model that cannot select rows gives its output layer all of them.
            rows = given if self._loaded.selects_rows else given[torch.tensor(logit_rows, device=given.device)]
        self._rows = None if rows is None else rows[: len(logit_rows)]
        self._given = None

    def split(self) -> list[Tensor]:
        if self._rows is None:
            if not self.keeps or any(self._counts):
                raise RuntimeError("no hidden states were kept in the last pass")
            # Not even one row was wanted.
            return [torch.empty(0, 0) for _ in self._counts]
        return list(self._rows.split(self._counts))

    def _on_output_layer(self, module: Any, inputs: tuple[Tensor, ...]) -> None:
        self._given = inputs[0].detach()


def no_progress() -> None:
    pass


class ModelRunner:
    """Drives a loaded model. Not thread-safe: one compute thread calls it.

    `rules`: paddings under which rows round alike on this machine, as `moot.model.backend` finds and checks them. With
    them (batch-invariant mode) the logits of a token depend on the tokens before it and on nothing else, bit by bit:
    not on chunks, batch-mates, trees around it or where the cache came from. Without, rows round as they come.
    """

    def __init__(self, loaded: LoadedModel, kv_capacity_tokens: int, rules: RowRules | None = None) -> None:
        self.loaded = loaded
        self.info: ModelInfo = loaded.info
        self.dtype, self.device = loaded.kv_shape.dtype, loaded.kv_shape.device
        self.pool = KvPool(loaded.kv_shape, kv_capacity_tokens)
        self.batch_invariant = rules is not None
        self._states = States(loaded)
        natural = NATURAL if loaded.decoder is None else loaded.decoder.natural_rules
        self.rules: RowRules = natural if rules is None else rules
        self.numerics_fingerprint = numerics_fingerprint(self.dtype, self.device, self.rules, self.way)

    def new_cache(self) -> KvCache:
        return SequenceCache(self.pool)

    @torch.inference_mode()
    def forward(
        self,
        inputs: Sequence[SequenceInput],
        progress: Callable[[], None] = no_progress,
        layers: tuple[int, ...] | None = None,
    ) -> list[Tensor]:
        """Run all tokens once. Returns per input logits [len(logit_rows), vocab], float32 (of float64 models float64).

        The tokens' keys and values are pending in their caches until `commit`. `progress` is called for every layer
        and tile. Raises NoCapacity (some caches may have grown, none has changed its content), ValueError for
        malformed inputs and ContextLengthExceeded past the model's limit. `layers`: go through these alone, ascending,
        where `can_skip_layers`: a guess of what the model says, from keys and values that other layers do not get.
        """
        self._states.begin([len(item.logit_rows) for item in inputs])
        segments, token_ids, positions, logit_rows = self._plan(inputs)
        if not token_ids:
            return [self._no_logits() for _ in inputs]
        padding = num_step_rows(segments, self.rules) - len(token_ids)
        token_ids += [token_ids[-1]] * padding
        positions += [positions[-1]] * padding
        step = Step(segments, progress)
        if self.loaded.decoder is not None:
            logits = self.loaded.decoder.forward(token_ids, positions, logit_rows, step, self.rules, layers)
        else:
            if layers is not None:
                raise ValueError("modules cannot skip layers")
            with tiled(self.rules, progress):
                logits = self.loaded.call(
                    torch.tensor([token_ids], device=self.device),
                    torch.tensor([positions], device=self.device),
                    torch.tensor(logit_rows, device=self.device),
                    {STEP_ARGUMENT: step},
                )
        self._states.keep(logit_rows)
        return list(logits.split([len(item.logit_rows) for item in inputs]))

    @property
    def way(self) -> str:
        """Name of the code that computes a pass."""
        return "modules" if self.loaded.decoder is None else self.loaded.decoder.way

    @property
    def can_skip_layers(self) -> bool:
        return self.loaded.decoder is not None

    def keep_states(self) -> None:
        """Let passes leave, from now on, the hidden states of their logit rows: see `states`. No logit changes."""
        self._states.start()

    def states(self) -> list[Tensor]:
        """Per input of the last pass that did not raise [len(logit_rows), width], as the output layer was given them.

        Valid until the next pass. Raises RuntimeError unless `keep_states` was called before that pass.
        """
        return self._states.split()

    def _plan(self, inputs: Sequence[SequenceInput]) -> tuple[list[Segment], list[int], list[int], list[int]]:
        segments: list[Segment] = []
        token_ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        for item in check_inputs(inputs, SequenceCache, self.loaded.num_embeddings, self.info.context_limit):
            start, length = len(token_ids), item.cache.length
            if item.depths:
                segments.append(plan_segment(item.cache, start, item.parents, item.depths, self.rules))
            token_ids += item.token_ids
            positions += [length + depth for depth in item.depths]
            logit_rows += [start + row for row in item.logit_rows]
        return segments, token_ids, positions, logit_rows

    def _no_logits(self) -> Tensor:
        dtype = torch.float64 if self.dtype is torch.float64 else torch.float32
        return torch.empty(0, self.loaded.num_logits, dtype=dtype, device=self.device)
