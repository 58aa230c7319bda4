"""Allocations that fail at chosen sizes, in the middle of the real code: steps shrink, at worst one request fails."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moot.core.errors import NoCapacity, OutOfMemory, is_out_of_memory
from moot.core.types import ROOT, Draft, SamplingParams
from moot.model.cache.contiguous import PAGE_SLOTS
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from services.verifier.engine import Engine
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.verifier_driver import DraftOf, MakeEngine, Play, Script, Text, play, run, texts

PARAMS = [
    SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=24, ignore_eos=True) for number in range(8)
]
SetFaults = Callable[[str], None]


def counted(engine: Engine, cost: str) -> float:
    return engine.metrics.registry.get_sample_value("moot_out_of_memory_total", {"cost": cost}) or 0.0


def prompt_of(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + index * index) % 250 for index in range(length)]


def plays_of(
    numbers: Sequence[int], drafts: Sequence[DraftOf] = (lambda _: Draft(),) * 8, ill: int | None = None
) -> list[Play]:
    """Requests by number, of which one is called ill."""
    return [play(prompt_of(n), PARAMS[n], drafts[n], request_id="ill" if n == ill else "well") for n in numbers]


def plain(engine: Engine, numbers: Sequence[int]) -> list[Text]:
    """Each alone."""
    return [text for number in numbers for text in texts(run(engine, plays_of([number])))]


class Watching:
    """A runner that begins no pass while the one before, which found no memory, still holds what it had allocated."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._failed: weakref.ref[Tensor] | None = None

    def forward(self, inputs: Sequence[SequenceInput], progress: Callable[[], None]) -> list[Tensor]:
        assert self._failed is None or self._failed() is None, "the pass that failed still holds its memory"
        activations = torch.zeros(1)
        try:
            return self._runner.forward(inputs, progress)
        except torch.OutOfMemoryError:
            self._failed = weakref.ref(activations)
            raise


def test_a_batch_of_eight_with_room_for_three_finishes_right(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """Passes of more than three tokens fail with all caches grown and a layer written, and what failed is let go before
    the next: prompts are read in pieces, batches halved, drafts left out, and all eight texts are those of an engine
    with memory."""
    engine = make_engine(batch_invariant=True, dtype="float32")
    expected = plain(engine, range(8))
    set_faults("verifier.forward=memory:3")
    engine.serving.steps._runner = Watching(engine.runner)  # type: ignore[assignment]  # all that a step calls
    drafts = [Script(ids, 6, random.Random(number)) for number, (ids, _) in enumerate(expected)]
    assert texts(run(engine, plays_of(range(8), drafts))) == expected
    assert counted(engine, "step") > 8
    assert counted(engine, "draft") > 0
    assert counted(engine, "request") == 0


def test_the_one_request_that_never_finds_memory_fails_alone(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """It is told why; before, what can be skipped was given up. Those in its batch notice nothing; nothing stays."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_block_tokens=8)
    expected = plain(engine, range(8))
    assert len(engine.serving.sharing.cache) > 0
    set_faults("verifier.forward=memory:0@ill")
    results = run(engine, plays_of(range(8), ill=5))
    failure = results.pop(5).failure
    assert failure is not None
    assert failure.error is OutOfMemory
    assert texts(results) == expected[:5] + expected[6:]
    assert counted(engine, "request") == counted(engine, "prefix") == 1
    assert engine.runner.pool.used_tokens == 0
    assert engine.metrics.registry.get_sample_value("moot_kv_cache_usage_ratio") == 0.0


def test_a_cache_that_cannot_grow_fails_its_request_alone(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """KV beyond 256 slots is not to be had: the long request fails when it gets there, the short ones finish."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_cache_tokens=0)
    expected = plain(engine, range(3))
    set_faults("kv.allocate=memory:256")
    *results, long = run(engine, [*plays_of(range(3)), play(prompt_of(3, 600), PARAMS[3])])
    assert texts(results) == expected
    assert long.failure is not None
    assert long.failure.error is OutOfMemory
    assert engine.runner.pool.used_tokens == 0


def test_a_known_prefix_without_memory_is_computed_anew(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """Copying shared blocks in finds no memory, nor does sharing one's own: both cost time, and no text."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_block_tokens=16)

    def text(before_step: Callable[[int], None] = lambda number: None) -> list[Text]:
        return texts(run(engine, [play(prompt_of(1, 300), PARAMS[1])], before_step=before_step))

    expected = text()
    assert len(engine.serving.sharing.cache) > 0
    # In the first step only: the first chunk fits, the rest of the prompt does not.
    assert text(lambda number: set_faults("" if number else "kv.allocate=memory:256")) == expected
    assert counted(engine, "prefix") == 1
    engine.serving.sharing.cache.clear()
    set_faults("verifier.share=memory")
    assert text() == expected
    assert len(engine.serving.sharing.cache) == 0
    assert counted(engine, "prefix") == 2


@pytest.mark.parametrize("draft", [Draft.chain(tuple(range(30))), Draft(tuple(range(30)), (ROOT,) * 30)])
def test_a_draft_without_memory_is_left_out(make_engine: MakeEngine, set_faults: SetFaults, draft: Draft) -> None:
    """A draft decides nothing: where it finds no memory, the round is plain decoding, and others keep theirs."""
    engine = make_engine()
    expected = plain(engine, (5, 6))
    set_faults("verifier.forward=memory:1@ill")
    results = run(engine, plays_of((5, 6), [lambda _: draft] * 8, ill=5))
    assert texts(results) == expected
    # The draft of the last round takes no row.
    assert not any(verification.num_accepted for verification in results[0].verifications[:-1])
    assert counted(engine, "draft") > 0


def test_giving_slots_back_needs_none(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """A cache shrinks into new memory. Without it the old stays, its pages stay charged, and it can be freed later."""
    engine = make_engine()
    cache = engine.runner.new_cache()
    cache.reserve(4 * PAGE_SLOTS)
    set_faults("kv.allocate=memory:1")
    cache.crop(0)
    assert cache.num_slots == engine.runner.pool.used_tokens == 4 * PAGE_SLOTS
    with pytest.raises(MemoryError):
        cache.reserve(5 * PAGE_SLOTS)
    assert engine.runner.pool.used_tokens == 4 * PAGE_SLOTS
    cache.free()
    assert engine.runner.pool.used_tokens == 0


def test_a_drafter_inside_without_memory_abstains(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """It has nothing to say while there is none, is asked again in the next step, and no text depends on it."""
    params = replace(PARAMS[0], max_tokens=12)
    engine = make_engine(drafters=("lookahead",))
    said, outputs = [], []
    for ids in (("lookahead",), ()):
        output: tuple[int, ...] = ()
        with LocalSession(engine, prompt_of(1), params, inside_drafter_ids=ids, num_inside_tokens=2) as session:
            output += session.open().output_token_ids
            for number in range(9):
                set_faults("verifier.attached=memory:0" if number % 3 == 0 else "")
                verification = session.verify()
                output += verification.output_token_ids
                said.append((number % 3, bool(verification.proposals)))
        outputs.append(output)
    assert outputs[0] == outputs[1]
    assert (0, True) not in said
    assert counted(engine, "drafter") >= 3
    assert [one.drafter_id for one in engine.serving.attached.drafters] == ["lookahead"]


def test_what_real_allocators_say_is_understood() -> None:
    """torch's CPU allocator, its GPU class, Python's and the pool's error; and nothing else."""
    with pytest.raises(RuntimeError) as host:
        torch.empty(10**15, dtype=torch.float64)
    with pytest.raises(MemoryError) as python:
        bytearray(2**62)
    good = [host.value, python.value, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")]
    good += [NoCapacity("KV cache is full"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling")]
    good += [RuntimeError("std::bad_alloc"), OSError(12, "Cannot allocate memory")]
    assert all(map(is_out_of_memory, good))
    bad = [RuntimeError("shapes do not fit"), ValueError("out of memory"), KeyError("memory"), OSError(5, "I/O error")]
    assert not any(map(is_out_of_memory, bad))
