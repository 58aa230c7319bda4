"""Allocations that fail at chosen sizes, in the middle of the real code: steps shrink, at worst one request fails."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moot.core.errors import NoCapacity, OutOfMemory, is_out_of_memory
from moot.core.types import SamplingParams
from moot.model.cache.contiguous import PAGE_SLOTS
from moot.runtime import faults
from services.verifier.engine import Engine
from tests.services.verifier.local_sessions import LocalSession
from tests.services.verifier.verifier_driver import MakeEngine, Result, Script, play, run

PARAMS = [
    SamplingParams(temperature=0.9 * (number % 2), seed=number, max_tokens=24, ignore_eos=True) for number in range(8)
]
SetFaults = Callable[[str], None]


@pytest.fixture
def set_faults(monkeypatch: pytest.MonkeyPatch) -> SetFaults:
    return lambda text: monkeypatch.setattr(faults, "_active", faults.parse_faults(text))


def counted(engine: Engine, cost: str) -> float:
    return engine.metrics.registry.get_sample_value("moot_out_of_memory_total", {"cost": cost}) or 0.0


def prompt_of(number: int, length: int = 20) -> list[int]:
    return [(number * 31 + index * index) % 250 for index in range(length)]


def plain(engine: Engine, number: int, length: int = 20) -> tuple[int, ...]:
    (result,) = run(engine, [play(prompt_of(number, length), PARAMS[number])])
    assert result.failure is None
    return result.output_token_ids


def texts(results: list[Result]) -> list[tuple[int, ...]]:
    assert [result.failure for result in results] == [None] * len(results)
    return [result.output_token_ids for result in results]


def test_a_batch_of_eight_with_room_for_three_finishes_right(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """Passes of more than three tokens fail with all caches grown and a layer written: prompts are read in pieces,
    batches halved, drafts left out, and all eight texts are those of an engine with memory."""
    engine = make_engine(batch_invariant=True, dtype="float32")
    expected = [plain(engine, number) for number in range(8)]
    set_faults("verifier.forward=memory:3")
    drafts = [Script(text, 6, random.Random(number)) for number, text in enumerate(expected)]
    results = run(engine, [play(prompt_of(number), PARAMS[number], drafts[number]) for number in range(8)])
    assert texts(results) == expected
    assert counted(engine, "step") > 8
    assert counted(engine, "draft") > 0
    assert counted(engine, "request") == 0


def test_the_one_request_that_never_finds_memory_fails_alone(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """It is told why; before, what can be skipped was given up. Those in its batch notice nothing; nothing stays."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_block_tokens=8)
    expected = [plain(engine, number) for number in range(8)]
    assert len(engine.serving.sharing.cache) > 0
    set_faults("verifier.forward=memory:0@huge")
    plays = [play(prompt_of(n), PARAMS[n], request_id="huge" if n == 5 else "small") for n in range(8)]
    results = run(engine, plays)
    failure = results[5].failure
    assert failure is not None
    assert failure.error is OutOfMemory
    assert texts(results[:5] + results[6:]) == expected[:5] + expected[6:]
    assert counted(engine, "request") == counted(engine, "prefix") == 1
    assert engine.runner.pool.used_tokens == 0
    assert engine.metrics.registry.get_sample_value("moot_kv_cache_usage_ratio") == 0.0


def test_a_cache_that_cannot_grow_fails_its_request_alone(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """KV beyond 256 slots is not to be had: the long request fails when it gets there, the short ones finish."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_cache_tokens=0)
    expected = [plain(engine, number) for number in range(3)]
    set_faults("kv.allocate=memory:256")
    results = run(engine, [*(play(prompt_of(n), PARAMS[n]) for n in range(3)), play(prompt_of(3, 600), PARAMS[3])])
    assert texts(results[:3]) == expected
    assert results[3].failure is not None
    assert results[3].failure.error is OutOfMemory
    assert engine.runner.pool.used_tokens == 0


def test_a_known_prefix_without_memory_is_computed_anew(make_engine: MakeEngine, set_faults: SetFaults) -> None:
    """Copying shared blocks in finds no memory, nor does sharing one's own: both cost time, and no text."""
    engine = make_engine(batch_invariant=True, dtype="float32", prefix_block_tokens=16)
    expected = plain(engine, 1, 300)
    assert len(engine.serving.sharing.cache) > 0
    answers: list[Result] = []
    set_faults("kv.allocate=memory:256")
    one = Stepped(engine, 1, 300)
    assert not one.step(), "the first chunk fits, the rest of the prompt does not"
    assert counted(engine, "prefix") == 1
    set_faults("")
    while not one.step():
        pass
    answers.append(one.result)
    assert texts(answers) == [expected]
    engine.serving.sharing.cache.clear()
    set_faults("verifier.share=memory")
    assert plain(engine, 1, 300) == expected
    assert len(engine.serving.sharing.cache) == 0
    assert counted(engine, "prefix") == 2


class Stepped:
    """One request, advanced by single steps of its engine."""

    def __init__(self, engine: Engine, number: int, length: int) -> None:
        self._engine = engine
        self._inbox: list[object] = []
        self._stream = engine.connect(self._inbox.extend)
        self._play = play(prompt_of(number, length), PARAMS[number])
        self.result = Result()
        engine.submit(self._stream, next(self._play))

    def step(self) -> bool:
        """Whether the request is over."""
        self._engine.step()
        answers, self._inbox[:] = list(self._inbox), []
        for answer in answers:
            try:
                self._engine.submit(self._stream, self._play.send(answer))  # type: ignore[arg-type]
            except StopIteration as stop:
                self.result = stop.value
                self._engine.disconnect(self._stream)
                self._engine.step()
                return True
        return False


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
    engine = make_engine(drafters=("lookahead",), start=True)
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
