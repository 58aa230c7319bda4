"""What the tests of the model runtime share: tiny models on disk, loaded or plain, and ways to run a text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from moot.model.backend import plain_runner
from moot.model.cache.kv_cache import KvCache
from moot.model.decoder.kernels.library import load_kernels
from moot.model.inputs import SequenceInput
from moot.model.loading.load import DTYPES, LoadedModel, load_model
from moot.model.runner import ModelRunner
from moot.shipped import cache_dir


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_model(path: Path, dtype: str) -> Any:
    """transformers' own model with its own attention: nothing of ours in it.

    Attention `sdpa`, because `eager` takes the softmax of a float64 model in float32; only that one caps scores.
    """
    capped = getattr(AutoConfig.from_pretrained(path), "attn_logit_softcapping", None) is not None
    attention = "eager" if capped else "sdpa"
    return AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation=attention).eval()


@torch.inference_mode()
def plain_logits(model: Any, token_ids: Sequence[int]) -> Tensor:
    """[tokens, vocab] of one pass over everything, without a cache."""
    logits = model(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits if logits.dtype is torch.float64 else logits.float()


def run_chunks(runner: ModelRunner, token_ids: Sequence[int], sizes: Sequence[int]) -> tuple[Tensor, KvCache]:
    """All logits [tokens, vocab], computed in chunks of these sizes (the last one takes what is left)."""
    cache, logits = runner.new_cache(), []
    for size in [*sizes, len(token_ids)]:
        chunk = token_ids[cache.length : cache.length + size]
        if chunk:
            logits += runner.forward([SequenceInput(cache, chunk, None, range(len(chunk)))])
            cache.commit(range(len(chunk)))
    return torch.cat(logits), cache


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes of a tree from its root's child to `node`; none for -1."""
    path: list[int] = []
    while node != -1:
        path.insert(0, node)
        node = parents[node]
    return path


def rows_of(
    runner: ModelRunner, cache: KvCache, token_ids: Sequence[int], parents: Sequence[int] | None = None
) -> Tensor:
    """Logits [tokens, vocab] of one input by itself."""
    return runner.forward([SequenceInput(cache, token_ids, parents, range(len(token_ids)))])[0]


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch: with several, work is split at other places."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def load_by_kernels(path: Path, variant: str) -> LoadedModel:
    """The model, computed by this variant of the kernels; skips where they cannot be had."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MOOT_KERNELS", variant)
        if load_kernels(cache_dir()) is None:
            pytest.skip(f"no kernels: a CPU with {variant}, and apt-get install gcc libc6-dev")
        loaded = load_model(path, dtype="bfloat16")
    assert loaded.decoder is not None
    assert loaded.decoder.kernels is not None
    assert loaded.decoder.kernels.variant.name == variant
    return loaded


def distance(ours: Tensor, plain: Tensor) -> float:
    """Largest difference, relative to the largest logit."""
    return ((ours - plain).abs().max() / plain.abs().max()).item()


def plain_and_half(path: Path, token_ids: Sequence[int]) -> tuple[Tensor, float]:
    """The model's logits in float64, and how far (norm) transformers' own bfloat16 pass is from them."""
    truth = plain_logits(plain_model(path, "float64"), token_ids)
    return truth, (plain_logits(plain_model(path, "bfloat16"), token_ids) - truth).norm().item()


def assert_is_the_plain_pass(path: Path) -> None:
    """In batch-invariant mode and float64: transformers' own logits, and the same bits whatever the chunks."""
    token_ids = random_ids(90)
    runner = plain_runner(load_model(path, dtype="float64"), 1024, True)
    logits, _ = run_chunks(runner, token_ids, [50, 3, 1])
    assert distance(logits, plain_logits(plain_model(path, "float64"), token_ids)) < 1e-12
    whole, _ = run_chunks(runner, token_ids, [])
    assert torch.equal(logits, whole)
