"""Heads: what they propose, by whatever batch, and where they stop or abstain."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moot.core.errors import ConfigError
from moot.core.history import History
from moot.core.types import Proposal, SamplingParams
from moot.drafters.attached.attached_interface import AttachedAsk
from moot.drafters.attached.head_steps import ByteProduct, FastSteps, PlainSteps, can_multiply, head_steps
from moot.drafters.attached.heads import HeadsDrafter, target_rows
from moot.drafters.attached.kinds import create_all_attached, create_attached
from moot.drafters.attached.recurrent_head import RecurrentHead
from moot.drafters.interface import parse_entries
from moot.model.backend import plain_runner
from moot.model.decoder.products import can_pack
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.attached.heads_made import KNOWN_IDS, by_the_book, make_head

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_tiny_model(tmp_path_factory.mktemp("target"), context=64)
    return plain_runner(load_model(folder, "cpu", "float32"), 2048, False)


@pytest.fixture(scope="module")
def head_folder(runner: ModelRunner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("head"), runner.loaded)


def made(runner: ModelRunner, folder: Path, **options: Any) -> HeadsDrafter:
    tail = "".join(f":{name}={value}" for name, value in options.items())
    (entry,) = parse_entries([f"h=heads:path={folder}{tail}"], "--drafters")
    drafter = create_attached(entry, runner)
    assert isinstance(drafter, HeadsDrafter)
    return drafter


@pytest.fixture(scope="module")
def drafter(runner: ModelRunner, head_folder: Path) -> HeadsDrafter:
    return made(runner, head_folder)


def said(drafter: HeadsDrafter, *asked: Any, **options: Any) -> list[Proposal]:
    """What it proposes to one ask."""
    (chains,) = drafter.propose([ask(*asked, **options)])
    return chains


def make_chosen(folder: Path, source: Path, count: int) -> Path:
    """A copy of a head that was never told of more than its first ids."""
    head, config = RecurrentHead.load(source)
    ids = head.get_buffer("token_ids")[:count]
    copy = RecurrentHead(replace(head.shape, vocab=count), ids)
    copy.load_state_dict({**head.state_dict(), "token_ids": ids, "bias": head.bias[[*range(count), -1]]})
    copy.save(folder, {"tokenizer_fingerprint": config["tokenizer_fingerprint"]})
    return folder


def ask(
    seed: int, params: SamplingParams = GREEDY, num_tokens: int = 4, width: int = 1, length: int = 9
) -> AttachedAsk:
    """After a text and a state of the target that are drawn from `seed`."""
    ids = random.Random(seed).choices(range(256), k=length)
    state = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return AttachedAsk(ids, params, History(ids[:3], ids[3:]), state, num_tokens, width)


SAMPLED = [SamplingParams(temperature=temperature, seed=seed) for temperature in (0.6, 1.0) for seed in (1, 2, 3)]


@pytest.mark.parametrize("params", [GREEDY, *SAMPLED], ids=lambda params: f"t{params.temperature}s{params.seed}")
def test_a_chain_is_what_the_head_says_step_by_step(
    runner: ModelRunner, head_folder: Path, drafter: HeadsDrafter, params: SamplingParams
) -> None:
    """Greedy: the highest logit. Sampled: the highest of logit / T and the target's own noise of that position, which
    is what makes both choose alike. Bytes: the head's own probability."""
    for seed in range(8):
        one = ask(seed, params)
        ((chain,),) = drafter.propose([one])
        ids, confidences = by_the_book(head_folder, runner.loaded, one.token_ids, one.state, params, 4)
        end = ids.index(258) + 1 if 258 in ids else 4
        assert chain.token_ids == tuple(ids[:end])
        assert all(abs(a - b) <= 1 for a, b in zip(chain.confidences, confidences, strict=False))


EVERY: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 0.8, "repetition_penalty": 1.5},
    {"temperature": 0.0, "logit_bias": {77: 3.0}},
]


def test_asks_together_are_answered_as_one_by_one(drafter: HeadsDrafter) -> None:
    """All sessions of a step, of any length, width and parameters, take the same passes and do not meet."""
    draw = random.Random(5)
    asks = []
    for seed in range(24):
        params = SamplingParams(seed=seed, **draw.choice(EVERY))
        asks.append(ask(seed, params, draw.randint(0, 6), draw.randint(1, 4), draw.randint(1, 62)))
    batched = drafter.propose(asks)
    assert batched == [drafter.propose([one])[0] for one in asks]
    assert sum(map(len, batched)) > 24


def test_filters_leave_out_what_the_sampler_would(drafter: HeadsDrafter) -> None:
    """top_k, top_p and min_p draw from the ids that they keep: where one id is left, every seed draws it."""
    for seed in range(6):
        best = said(drafter, seed, num_tokens=1)[0].token_ids
        for filters in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
            params = SamplingParams(temperature=1.5, seed=seed + 10, **filters)  # type: ignore[arg-type]
            assert said(drafter, seed, params, 1)[0].token_ids == best
        wide = said(drafter, seed, SamplingParams(temperature=9.0, top_k=3, seed=4), 1, 9)
        assert len({chain.token_ids[0] for chain in wide}) == 3


def test_a_wide_ask_gets_chains_that_part_at_their_first_token(drafter: HeadsDrafter) -> None:
    """The second-best first tokens, best first, each continued; the first chain is that of a narrow ask."""
    for seed in range(6):
        chains = said(drafter, seed, width=4)
        narrow = said(drafter, seed)
        assert chains[0] == narrow[0]
        firsts = [chain.token_ids[0] for chain in chains]
        assert len(set(firsts)) == len(chains) == 4
        assert [c.confidences[0] for c in chains] == sorted((c.confidences[0] for c in chains), reverse=True)
        assert all(len(chain.token_ids) == 4 or chain.token_ids[-1] == 258 for chain in chains)


def lengths(answers: list[list[Proposal]]) -> list[list[int]]:
    return [[len(chain.token_ids) for chain in chains] for chains in answers]


def test_it_proposes_no_more_than_it_may(runner: ModelRunner, head_folder: Path, drafter: HeadsDrafter) -> None:
    """K, its own longest chain, the context, no width and no K."""
    free = SamplingParams(temperature=0.0, ignore_eos=True)
    asks = [ask(1, free, number, width, length) for number, width, length in [(2, 1, 9), (9, 1, 9), (9, 1, 62)]]
    asks += [ask(1, free, 9, 1, 64), ask(1, free, 0), ask(1, free, 3, 0)]
    assert lengths(made(runner, head_folder, max_tokens=5).propose(asks)) == [[2], [5], [2], [], [], []]
    assert drafter.propose([]) == []


def test_a_chain_ends_where_the_request_would(drafter: HeadsDrafter) -> None:
    """Nothing follows an end token or a stop id."""
    plain = said(drafter, 2, SamplingParams(temperature=0.0, ignore_eos=True))[0].token_ids
    stop = SamplingParams(temperature=0.0, ignore_eos=True, stop_token_ids=frozenset({plain[1]}))
    chain = said(drafter, 2, stop)[0].token_ids
    assert chain == plain[: plain.index(plain[1]) + 1]


def test_a_chain_ends_where_confidence_falls(runner: ModelRunner, head_folder: Path, drafter: HeadsDrafter) -> None:
    """Every kept token's whole path is as probable as asked for, and what a chain says is what it says without."""
    sure = made(runner, head_folder, min_confidence=0.05)
    shorter = 0
    for seed in range(12):
        whole, cut = said(drafter, seed, width=3), said(sure, seed, width=3)
        for chain in cut:
            assert any(chain.token_ids == other.token_ids[: len(chain.token_ids)] for other in whole)
            reach = 1.0
            for byte in chain.confidences:
                reach *= (byte + 0.5) / 255
            assert reach >= 0.05
        shorter += sum(len(chain.token_ids) for chain in cut) < sum(len(chain.token_ids) for chain in whole)
    assert shorter > 3


def test_requests_with_rules_of_their_own_are_drafted_by_them(drafter: HeadsDrafter) -> None:
    """Allowed ids, a bias, no end before min_tokens; ids that the head does not know are never proposed."""
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=3)):
        for seed in range(5):
            allowed = replace(params, allowed_token_ids=frozenset({3, 50, 61}))
            chains = said(drafter, seed, allowed, width=3)
            assert {token for chain in chains for token in chain.token_ids} <= {50, 61}
            assert len(chains) == 2
            biased = replace(params, logit_bias={99: 1e4})
            assert said(drafter, seed, biased)[0].token_ids == (99,) * 4
            ending = replace(params, logit_bias={258: 1e4}, min_tokens=8)
            chain = said(drafter, seed, ending)[0].token_ids
            # Six of the nine ids are output: the next two must not end.
            assert 258 not in chain[:2]
            assert chain[2:] == (258,)
            assert drafter.propose([ask(seed, replace(params, allowed_token_ids=frozenset({3})))])[0] == []


def test_a_state_that_is_not_finite_abstains_alone(drafter: HeadsDrafter) -> None:
    """Its batch-mates are answered as ever."""
    for params in (GREEDY, SAMPLED[0], replace(GREEDY, logit_bias={77: 1.0})):
        broken = replace(ask(1, params), state=torch.full((64,), torch.nan))
        first, second, third = drafter.propose([ask(2, params), broken, ask(3, params)])
        assert second == []
        assert [first, third] == [said(drafter, seed, params) for seed in (2, 3)]


def test_a_head_of_another_target_is_refused(runner: ModelRunner, head_folder: Path, tmp_path: Path) -> None:
    """By the width of its state, by the tokenizer, by ids that the target does not have; and a folder without one."""
    with pytest.raises(ConfigError, match="no-such"):
        made(runner, tmp_path / "no-such")
    foreign = make_head(tmp_path / "foreign", runner.loaded, tokenizer_fingerprint="another")
    with pytest.raises(ConfigError, match="tokenizer another"):
        made(runner, foreign)
    with pytest.raises(ConfigError, match="ids that the target does not have"):
        made(runner, make_head(tmp_path / "ids", runner.loaded, [5, 259]))
    config = json.loads((head_folder / "config.json").read_text())
    wide = plain_runner(load_model(make_tiny_model(tmp_path / "wide", hidden=32), "cpu", "float32"), 512, False)
    assert config["state"] == 64
    with pytest.raises(ConfigError, match="64 numbers, the target's states have 32"):
        made(wide, head_folder)


def test_unknown_kinds_and_options_are_named(runner: ModelRunner, head_folder: Path) -> None:
    """As for every other kind: what is wrong, and what there is."""
    with pytest.raises(ConfigError, match=r"unknown drafter kind suffix inside the verifier \(known: heads, "):
        create_all_attached(["suffix"], "--drafters", runner)
    with pytest.raises(ConfigError, match="unknown option of drafter kind heads: size"):
        made(runner, head_folder, size=3)
    with pytest.raises(ConfigError, match="needs option path"):
        create_all_attached(["heads"], "--drafters", runner)
    with pytest.raises(ConfigError, match="named twice"):
        create_all_attached([f"heads:path={head_folder}"] * 2, "--drafters", runner)


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="this CPU does not pack bfloat16")
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_packed_weights_are_the_models_own(tmp_path: Path, tied: bool) -> None:
    """A decoder takes the output layer's weights away: the head gets them back, bit by bit."""
    folder = make_tiny_model(tmp_path, dtype=torch.bfloat16, tie_word_embeddings=tied)
    plain = load_model(folder, "cpu", "bfloat16", lean=False)
    packed = load_model(folder, "cpu", "bfloat16")
    assert packed.decoder is not None
    ids = torch.tensor(KNOWN_IDS)
    for one, other in zip(target_rows(plain, ids), target_rows(packed, ids), strict=True):
        assert torch.equal(one, other)


CAN_MULTIPLY = can_multiply(torch.bfloat16, torch.device("cpu"), 64)


@pytest.mark.skipif(not CAN_MULTIPLY, reason="this CPU has no products with bytes")
def test_fast_steps_are_those_of_the_head(tmp_path: Path) -> None:
    """Steps and logits in the fast layout differ from the head's own by rounding alone, for tokens that it can guess
    and for others, for few rows and for many."""
    loaded = load_model(make_tiny_model(tmp_path / "model", dtype=torch.bfloat16), "cpu", "bfloat16")
    head, _ = RecurrentHead.load(make_head(tmp_path / "head", loaded))
    embedding, rows = target_rows(loaded, head.get_buffer("token_ids"))
    fast, plain = head_steps(head, rows, embedding), PlainSteps(head, rows, embedding)
    assert isinstance(fast, FastSteps)
    generator = torch.Generator().manual_seed(2)
    latest = [[40, 41], [3, 129], [77, 4], [258, 5], [258, 258], [6, 7]]
    with torch.inference_mode():
        for count in (1, 2, 4, 6):
            states = torch.randn(count, 64, generator=generator)
            expected = plain.advance(states, latest[:count])
            apart = (fast.advance(states, latest[:count]) - expected).abs().max()
            assert float(apart) < 0.05 * float((expected - states).abs().max())
            logits = plain.logits(states)
            assert float((fast.logits(states) - logits).abs().max()) < 0.02 * float(logits.abs().max())


@pytest.mark.skipif(not CAN_MULTIPLY, reason="this CPU has no products with bytes")
def test_a_product_with_bytes_is_near_and_treats_rows_alone() -> None:
    """Each output is off by half a step of its scale an input at most, a weight of zeros gives zeros, and in a small
    product no row depends on its batch-mates."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(37, 48, generator=generator) * torch.logspace(-3, 3, 37)[:, None]
    weight[5] = 0.0
    x = torch.randn(9, 48, generator=generator).bfloat16()
    product = ByteProduct(weight.bfloat16())
    step = weight.abs().amax(1) / 126
    for count in (1, 3, 4, 9):
        found, exact = product(x[:count]).float(), x[:count].float() @ weight.bfloat16().float().T
        allowed = 0.51 * step * x[:count].float().abs().sum(1)[:, None] + 0.01 * exact.abs() + 1e-6
        assert bool(((found - exact).abs() <= allowed).all())
        assert not found[:, 5].any()
    assert torch.equal(product(x[:4]), torch.cat([product(x[row : row + 1]) for row in range(4)]))


def test_only_the_most_frequent_ids_are_guessed_where_asked(
    runner: ModelRunner, tmp_path: Path, head_folder: Path
) -> None:
    """`rows` keeps the first ids of the file: each chain is that of a head that never knew another."""
    few = make_chosen(tmp_path / "few", head_folder, 30)
    for seed in range(6):
        one = ask(seed, width=2)
        cut = made(runner, head_folder, rows=30).propose([one])
        assert cut == made(runner, few, rows=0).propose([one])
        assert {token for chain in cut[0] for token in chain.token_ids} <= set(KNOWN_IDS[:30])
    assert made(runner, head_folder, rows=1000).propose([ask(1)]) == made(runner, head_folder, rows=0).propose([ask(1)])
    with pytest.raises(ConfigError, match="rows"):
        made(runner, head_folder, rows=-1)


def test_what_was_drawn_first_is_the_surest(drafter: HeadsDrafter) -> None:
    """At temperature > 0 the chains of a wide ask stand in the order of their draw, and so do their confidences: the
    vote may trust them as it trusts greedy ones, though the likeliest token need not be drawn."""
    unlikely = 0
    for seed in range(30):
        params = SamplingParams(temperature=20.0, seed=seed)
        chains = said(drafter, seed, params, 1, 4)
        firsts = [chain.confidences[0] for chain in chains]
        assert firsts == sorted(firsts, reverse=True)
        unlikely += chains[0].token_ids != said(drafter, seed, num_tokens=1)[0].token_ids
    assert unlikely > 10
