"""Making training text: what is stored, and that interruptions do not show in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.training.chat import Chat
from lab.training.dataset import BEGIN, FORCED, GREEDY, SAMPLED, USER, Shard, TextStore, bits, is_held_out
from lab.training.prompts import Turn, built_in, free_running, read_prompts
from lab.training.text_making import TextMaker, TextSettings, draw, make_text, tapped
from moot.core.errors import ConfigError
from moot.model.backend import plain_runner
from moot.model.inputs import SequenceInput
from moot.model.loading.load import LoadedModel, load_model
from moot.testing.tiny_model import make_tiny_model
from tests.lab.training.small_text import SETTINGS


class Interrupted(Exception):
    pass


def assert_same_text(one: TextStore, other: TextStore) -> None:
    assert one.indices() == other.indices()
    for index in one.indices():
        first, second = one.read(index), other.read(index)
        for name in Shard.__slots__:
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_an_interruption_loses_a_shard_and_changes_nothing(
    target: LoadedModel, text: TextStore, tmp_path: Path
) -> None:
    """Text that was interrupted in the middle of a shard, and gone on with by a new process, is bit-equal."""
    maker = TextMaker(target, SETTINGS)
    store = TextStore.create(tmp_path, maker.manifest)
    make_text(maker, store, 20 * 96)
    written = 0

    def interrupt(count: int) -> None:
        nonlocal written
        written += count
        if written > 700:
            raise Interrupted

    with pytest.raises(Interrupted):
        maker.make(1, interrupt)
    assert maker.runner.pool.used_tokens == 0
    assert store.indices() == [0]
    again = TextMaker(target, SETTINGS)
    store = TextStore.create(tmp_path, again.manifest)
    assert make_text(again, store, text.num_positions)
    assert_same_text(store, text)


def test_shards_do_not_depend_on_the_ones_before(target: LoadedModel, text: TextStore) -> None:
    """Shard i is a function of the settings and i, so that a missing one can be made alone."""
    shard = TextMaker(target, SETTINGS).make(2)
    np.testing.assert_array_equal(shard.token_ids, text.read(2).token_ids)
    assert shard.token_ids.shape == (5, 160)


def test_a_time_limit_stops_between_shards(target: LoadedModel, tmp_path: Path) -> None:
    """Past its time nothing new is begun; what is there stays."""
    maker = TextMaker(target, SETTINGS)
    store = TextStore.create(tmp_path, maker.manifest)
    assert not make_text(maker, store, 1000, until=0.0)
    assert store.indices() == []


def test_another_seed_gives_another_text(target: LoadedModel, text: TextStore) -> None:
    """The seed decides the text."""
    shard = TextMaker(target, replace(SETTINGS, seed=4)).make(0)
    assert not np.array_equal(shard.token_ids, text.read(0).token_ids)


def test_a_folder_holds_one_text(target: LoadedModel, text: TextStore) -> None:
    """Shards of different settings never mix."""
    maker = TextMaker(target, replace(SETTINGS, seed=4))
    with pytest.raises(ConfigError, match="other settings"):
        TextStore.create(text.folder, maker.manifest)


def test_stored_states_are_the_runners(target: LoadedModel, text: TextStore) -> None:
    """The state of a position, times the output layer, gives the runner's logits for the tokens of its context."""
    shard = text.read(0)
    runner = plain_runner(target, 4096, False)
    head = target.model.get_output_embeddings().weight.detach()
    for row in (0, 5):
        borders = [*np.flatnonzero(shard.roles[row] == BEGIN).tolist(), SETTINGS.row_positions]
        first, end = borders[-2:]
        ids = shard.token_ids[row, first:end].tolist()
        with tapped(target) as tap:
            (logits,) = runner.forward([SequenceInput(runner.new_cache(), ids, None, range(len(ids)))])
            states = tap.take()
        torch.testing.assert_close(states @ head.T, logits)
        torch.testing.assert_close(shard.states(row)[first:end].float(), states, rtol=0.02, atol=0.02)


def test_the_tap_of_a_packed_decoder_sees_what_its_head_sees(tmp_path: Path) -> None:
    """The lean pass leaves the same states as the modules do, and is as it was afterwards."""
    folder = make_tiny_model(tmp_path, dtype=torch.bfloat16)
    loaded = load_model(folder, device="cpu", dtype="bfloat16")
    if loaded.decoder is None:
        pytest.skip("this CPU multiplies no packed bfloat16 weights")
    plain = load_model(folder, device="cpu", dtype="bfloat16", lean=False)
    head, states = loaded.decoder.head, []
    for model in (loaded, plain):
        runner = plain_runner(model, 512, False)
        with tapped(model) as tap:
            runner.forward([SequenceInput(runner.new_cache(), range(20), None, range(20))])
            states.append(tap.take().float())
    assert loaded.decoder.head is head
    assert float((states[0] - states[1]).norm() / states[1].norm()) < 0.05


def test_best_ids_and_totals_are_the_targets(target: LoadedModel, text: TextStore) -> None:
    """With the state they give the probability of each id, and what a greedy answer would be."""
    shard = text.read(1)
    head = target.model.get_output_embeddings().weight.detach()[: target.info.vocab_size]
    logits = shard.states().float() @ head.T
    torch.testing.assert_close(logits.logsumexp(-1).numpy(), shard.log_totals.copy(), rtol=0.02, atol=0.05)
    at_best = logits.gather(2, torch.from_numpy(shard.best.astype(np.int64))[..., None])[..., 0]
    assert bool((logits.amax(-1) - at_best < 0.2).all())
    greedy = shard.roles[:, 1:] == GREEDY
    np.testing.assert_array_equal(shard.best[:, :-1][greedy], shard.token_ids[:, 1:][greedy])


def test_every_role_occurs(text: TextStore) -> None:
    """Prompts, greedy answers, sampled ones and user turns by the target are all there."""
    roles = np.concatenate([shard.roles.ravel() for _, shard in text.shards()])
    assert set(np.unique(roles)) == {FORCED, GREEDY, SAMPLED, USER, BEGIN}


def test_each_conversation_has_a_context_of_its_own(text: TextStore) -> None:
    """Rows begin with a context and hold more than one, and the first state of each is what its first token gives."""
    shard = text.read(0)
    assert bool((shard.roles[:, 0] == BEGIN).all())
    begins = np.argwhere(shard.roles == BEGIN)
    assert len(begins) > len(shard.roles)
    first = {shard.hidden[row, position].tobytes() for row, position in begins.tolist()}
    assert len(first) == len(np.unique(shard.token_ids[shard.roles == BEGIN]))


def test_sampling_follows_the_distribution() -> None:
    """Inversion draws each id as often as its probability says, and the best one at temperature 0."""
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])).repeat(20_000, 1)
    best = logits.argmax(1)
    uniform = torch.from_numpy(np.random.default_rng(1).random(20_000, np.float32))
    ids = draw(logits, best, torch.ones(20_000), uniform)
    shares = torch.bincount(ids, minlength=5) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0]), atol=0.015, rtol=0)
    assert set(draw(logits, best, torch.zeros(20_000), uniform).tolist()) == {0}
    cooler = torch.bincount(draw(logits, best, torch.full((20_000,), 0.5), uniform), minlength=5) / 20_000
    assert cooler[0] == pytest.approx(0.25 / (0.25 + 0.09 + 0.0225 + 0.0025), abs=0.015)


def test_chat_parts_join_to_what_the_template_renders(target: LoadedModel) -> None:
    """A chat fed in parts is the chat that a server would be asked with."""
    chat, tokenizer = Chat(target.tokenizer), target.tokenizer
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]
    messages += [{"role": "user", "content": "why"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    parts = chat.turn("hello", True) + chat.encode("yes") + chat.turn("why", False)
    assert tokenizer.decode(parts) == whole
    open_parts = chat.open_turn("hel", True) + chat.encode("lo") + chat.after_open_turn() + chat.encode("yes")
    assert whole.startswith(tokenizer.decode(open_parts))


def test_prompts_that_are_measured_are_refused(tmp_path: Path) -> None:
    """A question whose id ends in 7 never reaches a training text."""
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": n, "turns": [f"question {n}"]} for n in range(80, 100)] + [{"prompt": "free"}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts, refused = read_prompts(path)
    assert refused == 2
    assert len(prompts) == 19
    assert not any("87" in turns[0].text or "97" in turns[0].text for turns in prompts)


@pytest.mark.parametrize("line", ["[]", "{}", '{"turns": [1]}', "nonsense", '{"question_id": 7, "prompt": "held out"}'])
def test_a_bad_prompts_file_is_named(tmp_path: Path, line: str) -> None:
    """A file with nothing to train on, or a line that is no prompt, is an error that names the file."""
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=r"bad\.jsonl"):
        read_prompts(path)


def test_prompts_of_a_file_are_used(target: LoadedModel) -> None:
    """With a share of 1 every conversation begins with a prompt of the file; rows to measure on have their own."""
    settings = replace(SETTINGS, prompts_share=1.0)
    prompts = [[Turn("measure" if is_held_out(number) else "learn")] for number in range(32)]
    shard = TextMaker(target, settings, prompts).make(0)
    for number, row in enumerate(shard.token_ids.tolist()):
        shown = target.tokenizer.decode(row)
        assert ("user\nmeasure" in shown, "user\nlearn" in shown) == (is_held_out(number), not is_held_out(number))


def test_built_in_prompts_are_many_and_filled_in() -> None:
    """Templates leave no hole, and rarely say the same twice."""
    rng = np.random.default_rng(0)
    texts = [turn.text for _ in range(500) for turn in built_in(rng)[:1]]
    assert len(set(texts)) > 400
    assert not any("{" in text or "}" in text for text in texts)
    assert any(turn.is_open and not turn.text for _ in range(50) for turn in free_running(rng))


def test_rows_longer_than_the_context_are_refused(target: LoadedModel) -> None:
    """Better an error at once than one in the middle of the night."""
    with pytest.raises(ConfigError, match="context"):
        TextMaker(target, TextSettings(long_positions=4096))


def test_bits_are_bfloat16() -> None:
    """What is stored reads back as the numbers rounded to bfloat16."""
    numbers = torch.randn(3, 4, 5)
    shard = Shard(*[np.zeros((3, 4), np.uint32)] * 4, bits(numbers))
    torch.testing.assert_close(shard.states(), numbers.to(torch.bfloat16), rtol=0, atol=0)
