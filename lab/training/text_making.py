"""Makes training text with the target: many rows in lock step, a token of each per pass.

A row is one conversation after the other, each in a context of its own.

A shard depends on the settings, its number and nothing else: it has random numbers of its own, starts with empty
caches, and all its passes have the same rows. So whatever was interrupted, the same text comes out; what is lost is the
shard that was being made.

Tokens for many rows at once, drawn by inversion: softmax, running sum, search.

Training text needs the target's distribution, not the noise that texts are served with: one uniform number a row
instead of one a vocabulary entry.

The target's last hidden state: what its output layer is given, as the runner computes it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.training.chat import Chat
from lab.training.dataset import BEGIN, Row, Shard, TextStore, bits, is_held_out, stages
from lab.training.fit import progress_bar
from lab.training.prompts import Turn, built_in, free_running
from moot.core.errors import ConfigError, MootError
from moot.model.cache.contiguous import PAGE_SLOTS, round_up
from moot.model.decoder.products import Product
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel
from moot.model.runner import ModelRunner


def draw(logits: Tensor, best: Tensor, temperatures: Tensor, uniform: Tensor) -> Tensor:
    """int64 [rows]: `best` where the temperature is 0, else a sample of softmax(logits / temperature).

    logits [rows, vocab]; best, int64, temperatures and uniform (in [0, 1)) [rows].
    """
    ids = best.clone()
    hot = (temperatures > 0).nonzero()[:, 0]
    if len(hot):
        cumulated = torch.softmax(logits[hot] / temperatures[hot, None].to(logits.dtype), 1).cumsum(1)
        wanted = uniform[hot, None].to(logits.dtype) * cumulated[:, -1:]
        ids[hot] = torch.searchsorted(cumulated, wanted, right=True)[:, 0].clamp_max(logits.shape[1] - 1)
    return ids


class Tap:
    """Collects the rows that go into the output layer, after the last norm."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self._rows.append(rows.detach().reshape(-1, rows.shape[-1]))

    def take(self) -> Tensor:
        """[rows, width] of all passes since the last call."""
        rows, self._rows = self._rows, []
        return torch.cat(rows)


class _TappedProduct(Product):
    """The output layer of a decoder, which tells a tap what it is given."""

    __slots__ = ("_product", "_tap")

    def __init__(self, product: Product, tap: Tap) -> None:
        self.outputs, self.inputs, self.has_bias = product.outputs, product.inputs, product.has_bias
        self._product, self._tap = product, tap

    def __call__(self, x: Tensor) -> Tensor:
        self._tap.add(x)
        return self._product(x)


@contextmanager
def tapped(loaded: LoadedModel) -> Iterator[Tap]:
    """While it lasts, passes over `loaded` leave the hidden states of their logit rows in the tap."""
    tap = Tap()
    if loaded.decoder is not None:
        product = loaded.decoder.head
        loaded.decoder.head = _TappedProduct(product, tap)
        try:
            yield tap
        finally:
            loaded.decoder.head = product
        return
    model: Any = loaded.model

    def tell(module: Any, inputs: tuple[Tensor, ...]) -> None:
        tap.add(inputs[0])

    handle = model.get_output_embeddings().register_forward_pre_hook(tell)
    try:
        yield tap
    finally:
        handle.remove()


Rng = np.random.Generator


@dataclass(frozen=True, slots=True)
class TextSettings:
    """What decides the text. Every `long_every`-th shard has rows of `long_positions`, for long prompts and several
    turns; the others have rows of `row_positions`."""

    seed: int = 0
    rows: int = 192
    row_positions: int = 256
    long_rows: int = 128
    long_positions: int = 1024
    long_every: int = 8
    prompts_share: float = 0.25
    free_share: float = 0.25

    def __post_init__(self) -> None:
        if not (0.0 <= self.prompts_share <= 1.0 and 0.0 <= self.free_share <= 1.0):
            raise ConfigError("shares of prompts must be between 0 and 1")
        if min(self.rows, self.row_positions, self.long_rows, self.long_positions) < 1 or self.long_every < 0:
            raise ConfigError("rows and positions must be positive")

    def is_long(self, index: int) -> bool:
        return self.long_every > 0 and index % self.long_every == self.long_every - 1

    def shape(self, index: int) -> tuple[int, int]:
        """Rows and positions of a shard."""
        return (self.long_rows, self.long_positions) if self.is_long(index) else (self.rows, self.row_positions)


class TextMaker:
    """`prompts`: the user's turns of conversations beside the built-in ones."""

    def __init__(self, loaded: LoadedModel, settings: TextSettings, prompts: Sequence[Sequence[Turn]] = ()) -> None:
        shortest = max(settings.row_positions, settings.long_positions if settings.long_every else 0)
        if shortest > loaded.info.context_limit:
            raise ConfigError(f"rows of {shortest} positions exceed the target's context")
        self.settings = settings
        self.loaded = loaded
        self._chat = Chat(loaded.tokenizer)
        lengths = [len(self._chat.turn(turns[0].text, True)) for turns in prompts]
        # A prompt leaves room for an answer in its row.
        self._short = [p for p, n in zip(prompts, lengths, strict=True) if n <= settings.row_positions // 2]
        self._long = [
            p
            for p, n in zip(prompts, lengths, strict=True)
            if settings.row_positions // 2 < n <= settings.long_positions * 7 // 8
        ]
        self._digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()
        most = max(settings.rows * settings.row_positions, settings.long_rows * settings.long_positions)
        slack = max(settings.rows, settings.long_rows) * 2 * PAGE_SLOTS
        self.runner = ModelRunner(loaded, round_up(most, PAGE_SLOTS) + slack)

    @property
    def manifest(self) -> dict[str, Any]:
        info = self.loaded.info
        return {
            "target": info.model,
            "revision": info.revision,
            "tokenizer": info.tokenizer_fingerprint,
            "dtype": str(self.loaded.kv_shape.dtype),
            "prompts": self._digest,
            "settings": asdict(self.settings),
        }

    def folder(self, cache: Path) -> Path:
        settings = hashlib.sha256(json.dumps(self.manifest, sort_keys=True).encode()).hexdigest()[:12]
        return cache / "training" / target_fingerprint(self.loaded) / settings

    def make(self, index: int, progress: Callable[[int], None] = lambda count: None) -> Shard:
        """Shard number `index`. `progress` is called with the number of positions after each pass."""
        num_rows, positions = self.settings.shape(index)
        rngs = [np.random.default_rng((self.settings.seed, index, row)) for row in range(num_rows)]
        rows = [self._row(rng, self.settings.is_long(index), is_held_out(row)) for row, rng in enumerate(rngs)]
        uniform = np.random.default_rng((self.settings.seed, index)).random((positions, num_rows), np.float32)
        with tapped(self.loaded) as tap:
            return self._write(rows, positions, torch.from_numpy(uniform), tap, progress)

    def _row(self, rng: Rng, is_long: bool, held_out: bool) -> Row:
        longest = self.settings.long_positions * 3 // 8 if is_long else self.settings.row_positions * 3 // 4
        draw_turns = partial(self._conversation, is_long, held_out)
        return Row(stages(self._chat, draw_turns, rng, longest), self.loaded.info.end_token_ids)

    def _conversation(self, is_long: bool, held_out: bool, rng: Rng) -> Sequence[Turn]:
        prompts = (self._long or self._short) if is_long else self._short
        # An answer to the same prompt, perhaps the same answer, is never both learned and measured.
        prompts = [prompt for number, prompt in enumerate(prompts) if is_held_out(number) == held_out]
        if prompts and rng.random() < self.settings.prompts_share:
            return prompts[int(rng.integers(len(prompts)))]
        return free_running(rng) if rng.random() < self.settings.free_share else built_in(rng)

    @torch.inference_mode()
    def _write(
        self, rows: Sequence[Row], positions: int, uniform: torch.Tensor, tap: Tap, progress: Callable[[int], None]
    ) -> Shard:
        count, width = len(rows), hidden_width(self.loaded)
        shard = Shard(
            np.zeros((count, positions), np.uint32),
            np.zeros((count, positions), np.uint8),
            np.zeros((count, positions), np.uint32),
            np.zeros((count, positions), np.float32),
            np.zeros((count, positions, width), np.uint16),
        )
        caches = [self.runner.new_cache() for _ in rows]
        written = [0] * count
        try:
            for position in range(positions):
                taken = [row.take(token) for row, token in zip(rows, written, strict=True)]
                ids = [token for token, _ in taken]
                shard.token_ids[:, position] = ids
                shard.roles[:, position] = [role for _, role in taken]
                for cache, (_, role) in zip(caches, taken, strict=True):
                    if role == BEGIN:
                        cache.free()
                steps = [SequenceInput(cache, [token], None, (0,)) for cache, token in zip(caches, ids, strict=True)]
                logits = torch.cat(self.runner.forward(steps))[:, : self.loaded.info.vocab_size]
                for cache in caches:
                    cache.commit((0,))
                shard.hidden[:, position] = bits(tap.take())
                best = logits.argmax(1)
                shard.best[:, position] = best.numpy()
                shard.log_totals[:, position] = logits.logsumexp(1).numpy()
                temperatures = torch.tensor([row.temperature for row in rows])
                written = draw(logits, best, temperatures, uniform[position]).tolist()
                progress(count)
        finally:
            for cache in caches:
                cache.free()
        if not np.isfinite(shard.log_totals).all():
            raise MootError(f"{self.loaded.info.model}: logits are not finite")
        return shard


def make_text(maker: TextMaker, store: TextStore, num_positions: int, until: float = float("inf")) -> bool:
    """Write missing shards until the text has `num_positions`, or no further one after `until` (of time.monotonic).

    Returns whether the text is complete.
    """
    numerics = maker.runner.numerics_fingerprint
    needed, total = 0, 0
    while total < num_positions:
        total += int(np.prod(maker.settings.shape(needed)))
        needed += 1
    missing = [index for index in range(needed) if index not in store]
    done = sum(int(np.prod(maker.settings.shape(index))) for index in range(needed) if index not in missing)
    with progress_bar("text", "positions", total, done) as bar:
        for index in missing:
            start = time.monotonic()
            if start >= until:
                return False
            shard = maker.make(index, bar.update)
            store.write(index, shard, {"numerics": numerics, "seconds": round(time.monotonic() - start, 1)})
    return True


def hidden_width(loaded: LoadedModel) -> int:
    return int(loaded.model.get_input_embeddings().weight.shape[1])  # type: ignore[operator,union-attr]


def target_fingerprint(loaded: LoadedModel) -> str:
    info = loaded.info
    facts = (info.model, info.revision, info.tokenizer_fingerprint)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
