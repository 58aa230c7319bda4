"""Trainers: what they learn, that interruptions do not show, and that what they write loads again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from lab.training import fit as fitting
from lab.training.dataset import (
    BEGIN,
    FORCED,
    GREEDY,
    SAMPLED,
    Starts,
    TextStore,
    TrainingText,
    is_held_out,
    is_written,
)
from lab.training.drafter_folder import CountRecipe, CountTrainer, make_drafter
from lab.training.fit import FitPlan, fit
from lab.training.head_training import HeadRecipe, HeadTrainer
from lab.training.measure import TokenStream, divergence, from_single, leading, report
from lab.training.neural_training import NeuralRecipe, NeuralTrainer
from lab.training.teacher import Teacher, load_teacher
from moot.core.errors import ConfigError, ModelRefused
from moot.core.types import SamplingParams
from moot.drafters.attached.recurrent_head import RecurrentHead, embed
from moot.drafters.interface import Ask
from moot.drafters.registry import create

HEADS = HeadRecipe(width=48, vocab=200, depths=2, passes=5.0, batch=64, rate=5e-3)
NEURAL = NeuralRecipe(width=64, layers=1, vocab=200, sampled=20, passes=2.0, window=32, batch=8)


@pytest.fixture(scope="module")
def teacher(target_folder: Path, text: TextStore) -> Teacher:
    return load_teacher(target_folder, text)


@pytest.fixture(scope="module")
def dataset(text: TextStore) -> TrainingText:
    return TrainingText.of(text, text.num_positions)


def make(kind: str, teacher: Teacher, dataset: TrainingText) -> Any:
    match kind:
        case "heads":
            return HeadTrainer(teacher, dataset, HEADS)
        case "neural":
            return NeuralTrainer(teacher, dataset, NEURAL)
    return CountTrainer(teacher, dataset, CountRecipe(3, 2))


def held_out_divergence(trainer: HeadTrainer) -> float:
    starts = Starts(trainer.text, 0, HEADS.depths + 1, 2, 0, within=True, held_out=True)
    with torch.inference_mode():
        return float(trainer.loss(starts.batch(0, 128)))


@pytest.mark.parametrize("with_other", [False, True])
def test_divergence_and_its_gradients_are_the_plain_ones(with_other: bool) -> None:
    """The loss in parts, with gradients by hand, is what automatic differentiation makes of the formula."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    count, ids, width, state = 300, 17, 5, 7
    states, rows = random(count, width).requires_grad_(), random(ids, width).requires_grad_()
    bias, other = random(ids + with_other).requires_grad_(), random(width).requires_grad_()
    teacher_states, teacher_rows, hidden_rows = random(count, state), random(ids, state), random(9, state)
    totals = (teacher_states @ torch.cat((teacher_rows, hidden_rows)).T).logsumexp(1)
    extra = {"other": other, "log_totals": totals} if with_other else {}
    ours = divergence(states, rows, teacher_states, teacher_rows, bias, **extra)
    wanted = [states, rows, bias] + ([other] if with_other else [])
    found = torch.autograd.grad(ours * 3, wanted)
    all_logits = teacher_states @ torch.cat((teacher_rows, hidden_rows)).T
    p = all_logits.softmax(1)
    p = torch.cat((p[:, :ids], p[:, ids:].sum(1, keepdim=True)), 1) if with_other else all_logits[:, :ids].softmax(1)
    logits = torch.cat((states @ rows.T, (states @ other)[:, None]), 1) if with_other else states @ rows.T
    plain = functional.kl_div((logits + bias).log_softmax(1), p, reduction="batchmean")
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    for ours_of, plain_of in zip(found, torch.autograd.grad(plain * 3, wanted), strict=True):
        torch.testing.assert_close(ours_of, plain_of, rtol=1e-3, atol=1e-5)


def test_a_head_learns_what_the_target_says(teacher: Teacher, dataset: TrainingText, tmp_path: Path) -> None:
    """Training lowers the divergence on rows that were not trained on."""
    trainer = HeadTrainer(teacher, dataset, HEADS)
    before = held_out_divergence(trainer)
    assert trainer.train(tmp_path, trainer.facts)
    assert held_out_divergence(trainer) < 0.85 * before


def test_a_small_llama_learns_what_the_target_says(teacher: Teacher, dataset: TrainingText, tmp_path: Path) -> None:
    """Training lowers the divergence."""
    trainer = NeuralTrainer(teacher, dataset, NEURAL)
    before = trainer.loss(10_000).item()
    assert trainer.train(tmp_path, trainer.facts)
    assert trainer.loss(10_000).item() < 0.9 * before


@pytest.mark.parametrize("kind", ["heads", "neural"])
def test_an_interrupted_training_ends_the_same(
    kind: str, teacher: Teacher, dataset: TrainingText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after some steps and gone on with by a new trainer, every weight is bit-equal."""
    whole, first, second = (make(kind, teacher, dataset) for _ in range(3))
    assert whole.train(tmp_path / "whole", whole.facts)
    clock = iter(range(1000))
    with monkeypatch.context() as patch:
        patch.setattr(fitting.time, "monotonic", lambda: next(clock))
        assert not first.train(tmp_path / "parts", first.facts, until=5)
    assert second.train(tmp_path / "parts", second.facts)
    weights = [(t.head if kind == "heads" else t.model).state_dict() for t in (whole, first, second)]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    """Going on never mixes two trainings; a broken checkpoint is named."""
    module, plan = torch.nn.Linear(2, 1), FitPlan(2, 0.1)

    def loss(step: int) -> torch.Tensor:
        return module(torch.ones(1, 2)).square().sum()

    assert fit(module, loss, plan, tmp_path, {"seed": 1})
    with pytest.raises(ConfigError, match="other settings"):
        fit(module, loss, plan, tmp_path, {"seed": 2})
    (tmp_path / ".checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(ConfigError, match="cannot be read"):
        fit(module, loss, plan, tmp_path, {"seed": 1})


def test_the_seed_decides(teacher: Teacher, dataset: TrainingText) -> None:
    """Same seed, same first weights and batches; another seed, others."""
    one, same = HeadTrainer(teacher, dataset, HEADS), HeadTrainer(teacher, dataset, HEADS)
    with torch.no_grad():
        assert torch.equal(*(trainer.loss(trainer._starts.batch(3, 64)) for trainer in (one, same)))
    starts = [Starts(dataset, 0, 3, 2, seed, within=True) for seed in (0, 1)]
    assert not torch.equal(*(one.batch(0, 64).token_ids for one in starts))


@pytest.mark.parametrize("kind", ["heads", "neural", "ngram"])
def test_a_drafter_is_written_measured_and_described(
    kind: str, teacher: Teacher, dataset: TrainingText, text: TextStore, tmp_path: Path
) -> None:
    """The folder holds the drafter and a card with its acceptance and command; no checkpoint is left."""
    said: list[str] = []
    assert make_drafter(make(kind, teacher, dataset), text, tmp_path, "moot train ...", say=said.append)
    card = (tmp_path / "README.md").read_text()
    assert "mean acceptance length, K = 8" in card
    assert "moot train ..." in card
    assert not (tmp_path / ".checkpoint.pt").exists()
    assert "K = 4" in said[0]


def test_a_saved_head_computes_the_same(teacher: Teacher, dataset: TrainingText, tmp_path: Path) -> None:
    """What is read back is what was written, rounded to bfloat16; its config says whose head it is."""
    trainer = HeadTrainer(teacher, dataset, HEADS)
    trainer.save(tmp_path, trainer.facts)
    head, config = RecurrentHead.load(tmp_path)
    assert config["tokenizer_fingerprint"] == teacher.info.tokenizer_fingerprint
    states, ids = torch.randn(4, teacher.state), torch.randint(250, (4, HEADS.tokens))
    embedded = embed(teacher.embedding, ids)
    ours = trainer.head.logits(trainer.head.advance(states, embedded), trainer.rows)
    read = head.logits(head.advance(states, embedded), teacher.rows[head.get_buffer("token_ids")])
    # Trained in ascending order of ids, written in that of their frequency; the last column stands for all others.
    ids_read = head.get_buffer("token_ids")
    assert ids_read.tolist() == dataset.by_frequency(HEADS.vocab).tolist()
    columns = [*torch.searchsorted(trainer.head.get_buffer("token_ids"), ids_read).tolist(), -1]
    torch.testing.assert_close(ours[:, columns], read, rtol=0.05, atol=0.05)
    (tmp_path / "config.json").write_text(json.dumps(config | {"width": 5}))
    with pytest.raises(ConfigError, match="recurrent head"):
        RecurrentHead.load(tmp_path)


def test_a_saved_llama_is_a_neural_drafter(teacher: Teacher, dataset: TrainingText, tmp_path: Path) -> None:
    """The folder is a model with the target's tokenizer, from which the kind `neural` proposes."""
    trainer = NeuralTrainer(teacher, dataset, NEURAL)
    trainer.save(tmp_path, trainer.facts)
    drafter = create("neural", {"model": str(tmp_path), "device": "cpu", "dtype": "float32"})
    assert drafter.model_info is not None
    assert drafter.model_info.tokenizer_fingerprint == teacher.info.tokenizer_fingerprint
    assert drafter.model_info.end_token_ids == teacher.info.end_token_ids
    ids = list(b"hello there")
    ((chain,),) = drafter.propose([Ask(drafter.open(ids, SamplingParams()), 1)])
    with torch.inference_mode():
        logits = trainer.model(torch.tensor([ids])).logits[0, -1, : teacher.info.vocab_size]
    assert logits[chain.token_ids[0]] >= logits.max() - 0.05


def test_measured_acceptance_of_a_table_is_the_drafters(
    teacher: Teacher, dataset: TrainingText, tmp_path: Path
) -> None:
    """The reported agreement is that of the drafter kind, asked at each position of held-out answers."""
    trainer = CountTrainer(teacher, dataset, CountRecipe(3, 2))
    trainer.save(tmp_path, trainer.facts)
    found = trainer.measure()
    drafter = create("ngram", {"vocab_size": teacher.info.vocab_size, "table": str(tmp_path / "table.npz")})
    hit = total = 0
    for context, roles, _ in dataset.contexts():
        ids = context.tolist()
        for position in np.flatnonzero(roles == GREEDY).tolist():
            chains = drafter.propose([Ask(drafter.open(ids[:position], SamplingParams()), 1)])[0]
            total += 1
            hit += bool(chains) and chains[0].token_ids[0] == ids[position]
    assert found["tokens"] == total > 20
    assert found["agreement_1"] == pytest.approx(hit / total, abs=1e-4)


def test_rounds_are_walked_as_they_happen() -> None:
    """Each round commits the leading right tokens, at most K of them, and one more."""
    roles = np.array([FORCED] * 3 + [GREEDY] * 10 + [FORCED, SAMPLED, SAMPLED], np.uint8)
    right = np.array([0, 0, 4, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0])
    # After position 2: 4 right and one more (3..7); after 7: the 5 that are left.
    found = report([TokenStream(roles, right)])
    assert (found["tokens"], found["length_4"], found["length_8"]) == (10, 10 / 2, 10 / 2)
    assert found["agreement_1"] == 0.2
    assert found["sampled_length_4"] == 1.0
    assert leading(np.array([[True, True, False, True], [False, True, True, True]])).tolist() == [2, 0]
    assert from_single(np.array([True] * 10 + [False, True])).tolist() == [8, 8, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1]


def test_nothing_is_learned_from_held_out_rows(dataset: TrainingText) -> None:
    """Starts, frequent ids and counted texts come from the other rows alone."""
    shard = dataset.shards[0]
    held = {tuple(shard.token_ids[row, :40].tolist()) for row in range(20) if is_held_out(row)}
    starts = Starts(dataset, 0, 40, 2, 0, within=False)
    windows = starts.batch(0, len(starts)).token_ids.tolist()
    assert not held.intersection(map(tuple, windows))
    written = sum(int(is_written(shard.roles[row]).sum()) for shard, row in dataset.rows(held_out=False))
    assert sum(map(len, dataset.written())) == written


def test_windows_stay_within_a_context(dataset: TrainingText) -> None:
    """What stands before a context is not known in it: no window of a head goes over its begin."""
    starts = Starts(dataset, 2, 8, 2, 0, within=True)
    roles = starts.batch(0, len(starts)).roles
    assert not bool((roles[:, 1:] == BEGIN).any())


def test_each_pass_sees_every_start_once(dataset: TrainingText) -> None:
    """Batches run through a shuffled pass, then through the next one."""
    starts = Starts(dataset, 0, 3, 2, 0, within=True)
    batch = -(-len(starts) // 4)
    seen = torch.cat([starts.batch(step, batch).states[:, 0] for step in range(4)])[: len(starts)]
    whole = starts.read(starts._all).states[:, 0]

    def ordered(rows: torch.Tensor) -> torch.Tensor:
        return rows.float().sum(1).sort().values

    torch.testing.assert_close(ordered(seen), ordered(whole))


def test_text_that_is_too_short_is_named(text: TextStore) -> None:
    """A trainer never learns from less than was asked for."""
    with pytest.raises(ConfigError, match="positions"):
        TrainingText.of(text, 10_000_000)


def test_states_of_another_target_are_refused(text: TextStore, tmp_path: Path) -> None:
    """States that do not give the logits of the model they are said to be of are found out at once."""
    from moot.testing.tiny_model import make_tiny_model

    with pytest.raises(ModelRefused, match="output layer"):
        load_teacher(make_tiny_model(tmp_path, hidden=64, sharpness=6.0, seed=9), text)
