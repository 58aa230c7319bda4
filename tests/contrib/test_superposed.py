"""Superposed drafting against the draft model alone, and against sums and shares over the whole vocabulary."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from contrib.superposed.beam import SILENT, Beam, Grown, interpolated, voice_after
from contrib.superposed.superposed import SESSIONS_AT_ONCE, SuperposedDrafter
from contrib.superposed.superposed_rows import MixedRows
from moot.core.errors import ConfigError
from moot.core.noise import gumbel
from moot.core.types import Proposal, SamplingParams
from moot.drafters.interface import Ask, Drafter
from moot.drafters.lookup.ngram import NgramTable
from moot.drafters.neural.neural_sessions import NeuralSession
from moot.drafters.registry import create
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.testing.tiny_model import make_tiny_model
from tests.drafters.neural.draft_models import CONTEXT, COUPLED, GREEDY, PENALISED, VOCAB, exact, neural, poisoned

BIASED = SamplingParams(temperature=0.0, logit_bias={7: 100.0, 9: 99.0}, ignore_eos=True)
WEIGHT, STRENGTH = 0.6, 0.75


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("draft") / "model", vocab_size=300, context=CONTEXT)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of texts in which every id is followed by a few others, some of them often; ids of the padding occur, too."""
    rng = random.Random(1)
    texts = [[rng.choice((id_, 3 * id_ % 300, rng.randrange(300))) for id_ in range(300)] for _ in range(20)]
    path = tmp_path_factory.mktemp("table") / "table.npz"
    NgramTable.build(texts).save(path)
    return path


def superposed(folder: Path, **more: object) -> SuperposedDrafter:
    drafter = create("superposed", exact(folder, **more))
    assert isinstance(drafter, SuperposedDrafter)
    return drafter


@pytest.fixture(scope="module")
def drafter(folder: Path, table: Path) -> SuperposedDrafter:
    return superposed(
        folder, num_sequences=3, table=table, table_weight=WEIGHT, table_strength=STRENGTH, prefill_chunk=7
    )


def proposed(drafter: Drafter[Any], prefix: Sequence[int], params: SamplingParams, *asked: int) -> list[Proposal]:
    session = drafter.open(prefix, params)
    (chains,) = drafter.propose([Ask(session, *asked)])
    drafter.close(session)
    return chains


@pytest.mark.parametrize("params", [GREEDY, BIASED, COUPLED, PENALISED], ids=["greedy", "bias", "coupled", "penalised"])
def test_one_sequence_is_the_draft_model_alone(folder: Path, table: Path, params: SamplingParams) -> None:
    """With one sequence nothing is mixed and the table has nothing to tell apart: the proposals are those of `neural`,
    greedy to the last confidence; drawn, confidences know the noise, ids are the same."""
    alone = neural(folder)
    one = superposed(folder, num_sequences=1, table=table)
    rng = random.Random(3)
    prefix = [rng.randrange(VOCAB) for _ in range(12)]
    sessions = [(kind, kind.open(prefix, params)) for kind in (alone, one)]
    for _ in range(8):
        asked = rng.randrange(1, 7)
        (ours,), (theirs,) = (kind.propose([Ask(session, asked)])[0] for kind, session in sessions)
        assert ours.token_ids == theirs.token_ids
        assert len(ours.token_ids) == asked
        if params == GREEDY:
            assert ours == theirs
        committed = [*ours.token_ids[: rng.randrange(asked + 1)], rng.randrange(VOCAB)]
        for kind, session in sessions:
            kind.extend(session, committed)


@pytest.mark.parametrize("params", [GREEDY, COUPLED, PENALISED], ids=["greedy", "coupled", "penalised"])
def test_after_a_proposal_the_cache_is_that_of_the_prefix(
    drafter: SuperposedDrafter, folder: Path, params: SamplingParams
) -> None:
    """Rows of sums leave nothing: the cache holds what a prefill of the committed ids computes, bit by bit, and
    whatever is committed, the next proposals are those of a session that was never asked before."""
    rng = random.Random(5)
    prefix = [rng.randrange(VOCAB) for _ in range(9)]
    session = drafter.open(prefix, params)
    (first,) = drafter.propose([Ask(session, 6, 3)])
    assert len(first) == 3
    assert session.cache.length == len(prefix)
    alone = neural(folder)
    expected = alone.open([*prefix, 1], params)
    while alone.warm(expected):
        pass
    assert torch.equal(session.cache.read_block(0, len(prefix)), expected.cache.read_block(0, len(prefix)))
    for committed in ([], list(first[1].token_ids[:2]), [rng.randrange(VOCAB)], list(first[0].token_ids)):
        drafter.extend(session, committed)
        prefix += committed
        assert drafter.propose([Ask(session, 6, 3)])[0] == proposed(drafter, prefix, params, 6, 3)
        assert session.cache.length == len(prefix)
    drafter.close(session)
    assert drafter.kv_used_tokens == 0


def test_sequences_are_distinct_and_ordered(drafter: SuperposedDrafter) -> None:
    """At most as many sequences as were asked for: whole ones, the most probable first, then shorter ones that fell,
    the most probable first; none is the beginning of another. Asked for fewer, it says the first of them."""
    fell = 0
    for start in range(20):
        prefix = [start, 2 * start, 7]
        chains = proposed(drafter, prefix, GREEDY, 5, 12)
        ids = [chain.token_ids for chain in chains]
        assert not any(one != other and one == other[: len(one)] for one in ids for other in ids)
        assert len(set(ids)) == len(ids)
        assert [len(one) for one in ids[:3]] == [5, 5, 5]
        assert all(len(one) < 5 for one in ids[3:])
        fell += len(ids) > 3
        for width in (1, 2, 3, 5):
            assert proposed(drafter, prefix, GREEDY, 5, width) == chains[:width]
        # Confidences are rounded probabilities: what they say of the whole sequences may be off by so much.
        whole = [math.prod(max(byte - 0.5, 0.0) / 255 for byte in chain.confidences) for chain in chains[:3]]
        most = [math.prod((byte + 0.5) / 255 for byte in chain.confidences) for chain in chains[:3]]
        assert whole[1] <= most[0]
        assert whole[2] <= most[1]
    assert fell > 10


@torch.inference_mode()
def by_hand(
    oracle: Any, table: NgramTable, prefix: Sequence[int], params: SamplingParams, num_tokens: int, num_sequences: int
) -> list[tuple[tuple[int, ...], list[float]]]:
    """Sequences with the probabilities of their ids, best first: full forwards over embeddings, all of the vocabulary,
    plain loops."""
    embeddings = oracle.get_input_embeddings().weight
    fed = [embeddings[id_] for id_ in prefix]
    sequences: list[tuple[tuple[int, ...], list[float]]] = [((), [])]
    for depth in range(num_tokens):
        if depth:
            total = sum(math.prod(shares) for _, shares in sequences)
            fed.append(sum(math.prod(shares) / total * embeddings[ids[-1]] for ids, shares in sequences))  # type: ignore[arg-type]
        row = oracle(inputs_embeds=torch.stack(fed)[None], use_cache=False).logits[0, -1, :VOCAB]
        chances = row.softmax(-1).tolist()
        noises = [0.0] * VOCAB
        if not params.is_greedy:
            chances = (row / params.temperature).softmax(-1).tolist()
            noises = [gumbel(params.seed, len(prefix) + depth, id_) for id_ in range(VOCAB)]
        found = []
        for ids, shares in sequences:
            own = list(chances)
            if depth:
                for order in (1, 2, 3):
                    context = [*prefix, *ids][-order:]
                    said = table.lookup(context)
                    if said is None:
                        break
                    counts = {id_: n for id_, n in zip(said.token_ids, said.counts, strict=True) if id_ < VOCAB}
                    rest = STRENGTH + said.total - sum(counts.values())
                    whole = said.total + STRENGTH
                    own = [(counts.get(id_, 0) + rest * before) / whole for id_, before in enumerate(own)]
            assert sum(own) == pytest.approx(1.0)
            raised = [
                chance ** (1 - WEIGHT) * voice**WEIGHT * math.exp(noise)
                for chance, voice, noise in zip(chances, own, noises, strict=True)
            ]
            total = sum(raised)
            found += [((*ids, id_), [*shares, value / total]) for id_, value in enumerate(raised)]
        found.sort(key=lambda one: -math.prod(one[1]))
        sequences = found[:num_sequences]
    return sequences


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_mixtures_are_as_worked_out_by_hand(
    drafter: SuperposedDrafter, oracle: Any, table: Path, temperature: float
) -> None:
    """Sum of embeddings, table, interpolation, noise and survivors at depths 1 to 4, over the whole vocabulary."""
    params = SamplingParams(temperature=temperature, seed=11, ignore_eos=True)
    raised = 0
    for prefix in ([40, 41, 42], [7] * 5, [200, 3, 90, 91], [251, 17]):
        for num_tokens in (1, 2, 4):
            expected = by_hand(oracle, NgramTable.load(table), prefix, params, num_tokens, 3)
            chains = proposed(drafter, prefix, params, num_tokens, 3)
            assert [chain.token_ids for chain in chains] == [ids for ids, _ in expected]
            for chain, (_, shares) in zip(chains, expected, strict=True):
                assert chain.confidences == pytest.approx([255 * share for share in shares], abs=0.51)
        raised += chains != proposed(drafter, [*prefix[:-1], prefix[-1] ^ 1], params, 4, 3)
    assert raised


def test_the_table_changes_what_is_drafted(folder: Path, drafter: SuperposedDrafter) -> None:
    """Without it all sequences share a row's distribution, from the second id on; the first ids are the model's own."""
    plain = superposed(folder, num_sequences=3)
    changed = 0
    for start in range(10):
        prefix = [start, 50 + start]
        assert proposed(plain, prefix, GREEDY, 1, 3) == proposed(drafter, prefix, GREEDY, 1, 3)
        changed += proposed(plain, prefix, GREEDY, 4, 3) != proposed(drafter, prefix, GREEDY, 4, 3)
    assert changed > 5


def test_batched_equals_alone(drafter: SuperposedDrafter) -> None:
    """Rows and sums of one forward never mix: prefixes, K, widths and parameters differ per ask (C04)."""
    rng = random.Random(9)
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 40))] for _ in range(SESSIONS_AT_ONCE + 6)]
    opened = [(prefix, rng.choice([GREEDY, COUPLED, PENALISED])) for prefix in prefixes]
    asked = [(rng.randrange(1, 6), rng.randrange(1, 5)) for _ in prefixes]
    alone = [proposed(drafter, *text, *limits) for text, limits in zip(opened, asked, strict=True)]
    sessions = [drafter.open(*text) for text in opened]
    assert drafter.propose([Ask(s, *limits) for s, limits in zip(sessions, asked, strict=True)]) == alone
    for session in sessions:
        drafter.close(session)
    assert drafter.kv_used_tokens == 0


def test_what_has_ended_is_not_fed_any_more(drafter: SuperposedDrafter) -> None:
    """Nothing follows an end; the other sequences go on without it, and where all have ended nothing is computed."""
    prefix = [3, 1, 4, 1, 5]
    first = proposed(drafter, prefix, GREEDY, 1, 3)
    ends = frozenset(chain.token_ids[0] for chain in first)
    stopping = dataclasses.replace(GREEDY, stop_token_ids=ends)
    assert proposed(drafter, prefix, stopping, 5, 3) == first
    best = dataclasses.replace(GREEDY, stop_token_ids=frozenset(first[0].token_ids))
    chains = proposed(drafter, prefix, best, 5, 8)
    assert first[0] in chains
    assert any(len(chain.token_ids) == 5 for chain in chains)
    assert not any(first[0].token_ids[0] in chain.token_ids[:-1] for chain in chains)


def test_a_sequence_ends_before_an_unlikely_token(folder: Path, table: Path) -> None:
    """`min_confidence` is of a token after its sequence; nothing likely at all abstains."""
    careful = superposed(folder, table=table, min_confidence=0.3)
    ended = 0
    for start in range(60):
        for chain in proposed(careful, [start, 5, 6], GREEDY, 6, 3):
            assert min(chain.confidences) >= round(255 * 0.3)
            ended += len(chain.token_ids) < 6
    assert ended > 5
    assert proposed(superposed(folder, min_confidence=1.0), [1, 5, 6], GREEDY, 6, 3) == []


def test_context_limit_is_respected(drafter: SuperposedDrafter) -> None:
    """C21: up to its own limit it drafts what fits; past it, and where nothing is asked, it abstains."""
    near = drafter.open([1] * (CONTEXT - 3), GREEDY)
    past, fine, empty = (drafter.open(prefix, GREEDY) for prefix in ([1] * (CONTEXT + 50), [1, 2], []))
    answers = drafter.propose([Ask(near, 8, 2), Ask(past, 8, 2), Ask(fine, 8, 2), Ask(empty, 8, 2)])
    assert [[len(chain.token_ids) for chain in chains] for chains in answers] == [[3, 3], [], [8, 8], []]
    assert drafter.propose([Ask(fine, 0, 2), Ask(near, 8, 0)]) == [[], []]
    for session in (near, past, fine, empty):
        drafter.close(session)
    assert drafter.kv_used_tokens == 0


def test_ids_in_the_padding_are_never_emitted_nor_fed(drafter: SuperposedDrafter) -> None:
    """C07: neither the model's rows nor the table's counts past the tokenizer's size can win; a prefix with an id past
    the embeddings abstains, also where the rows of sums begin."""
    hot = SamplingParams(temperature=5.0, seed=1, ignore_eos=True)
    session, foreign = drafter.open([280, 299, 270], hot), drafter.open([1, 2, 300], GREEDY)
    answers = drafter.propose([Ask(session, 30, 6), Ask(foreign, 4, 3)])
    assert len(answers[0]) >= 3
    assert all(token < VOCAB for chain in answers[0] for token in chain.token_ids)
    assert answers[1] == []
    drafter.close(session)
    drafter.close(foreign)


def test_rows_that_are_not_finite_abstain_alone(folder: Path, tmp_path: Path) -> None:
    """C20: a NaN row drops that proposal only; the same batch serves the others; a sum with NaN in it ends there."""
    drafted = proposed(superposed(folder), [1, 2, 3], GREEDY, 4, 3)
    broken_folder = poisoned(folder, tmp_path / "model", 200, drafted[0].token_ids[0])
    broken = superposed(broken_folder, batch_invariant=False)
    sick, ending, fine = (broken.open(prefix, GREEDY) for prefix in ([1, 200, 3], [1, 2, 3], [11, 12, 13]))
    answers = broken.propose([Ask(session, 4, 3) for session in (sick, ending, fine)])
    assert answers[0] == []
    assert [len(chain.token_ids) for chain in answers[1]] == [1, 1, 1]
    assert [len(chain.token_ids) for chain in answers[2]] == [4, 4, 4]


def test_without_room_idle_caches_go_first(folder: Path, table: Path) -> None:
    """KV memory is bounded: who is idle loses its cache before who is asked, the last asks go without, and whoever has
    lost one drafts the same when it is asked again."""
    small = superposed(folder, table=table, kv_capacity_tokens=1024)  # two pages of 512
    free = superposed(folder, table=table)
    prefixes = [[n, n + 1, n + 2] for n in range(3)]
    expected = [proposed(free, prefix, GREEDY, 4, 3) for prefix in prefixes]
    sessions = [small.open(prefix, GREEDY) for prefix in prefixes]
    for _ in range(2):
        for session, chains in zip(sessions, expected, strict=True):
            assert small.propose([Ask(session, 4, 3)]) == [chains]
            assert small.kv_used_tokens <= 1024
    answers = small.propose([Ask(session, 4, 3) for session in sessions])
    assert answers == [*expected[:2], []]
    assert small.propose([Ask(sessions[2], 4, 3)]) == [expected[2]]
    for session in sessions:
        small.close(session)
    assert small.kv_used_tokens == 0


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "opt"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_sum_is_fed_as_the_model_feeds_embeddings(tmp_path: Path, family: str, dtype: str) -> None:
    """A sum of one id and itself is that id: the same logits bit by bit, in families that scale or project their
    embeddings, by modules, by the decoder and by the accelerator's way; and the ids of texts keep theirs."""
    wide = {"head_dim": 32} if family.startswith("gemma") else {}
    path = make_tiny_model(tmp_path / "model", family, 300, dtype=getattr(torch, dtype), hidden=128, context=64, **wide)
    drafter = superposed(path, dtype=dtype)
    rows = drafter._drafting._rows
    runners = [drafter._runner]
    if family == "llama" and dtype == "float32":
        runners.append(GpuRunner(rows.loaded, 2048, False))
    for runner in runners:
        compare(runner, rows)


def compare(runner: ModelRunner, rows: MixedRows) -> None:
    (plain,) = runner.forward([SequenceInput(runner.new_cache(), (5, 6, 299), None, (0, 2))])
    fed = (rows.put(0, (5, 5), (0.5, 0.5)), 6, rows.put(63, (299, 299), (0.25, 0.75)))
    assert fed == (300, 6, 363)
    (mixed,) = runner.forward([SequenceInput(runner.new_cache(), fed, None, (0, 2))])
    assert torch.equal(plain, mixed)
    (other,) = runner.forward(
        [SequenceInput(runner.new_cache(), (rows.put(0, (5, 9), (0.5, 0.5)), 6, 7), None, (0, 2))]
    )
    assert not torch.equal(plain[0], other[0])


def test_voices_are_distributions() -> None:
    """Whatever the row is, what the table says of it, and the interpolation, sum to 1; unseen contexts say nothing."""
    rng = random.Random(2)
    texts = [[rng.randrange(12) for _ in range(60)] for _ in range(3)]
    counted = NgramTable.build(texts, num_successors=2)
    row = [rng.random() for _ in range(12)]
    row = [one / sum(row) for one in row]
    likely = {id_: (chance, chance) for id_, chance in enumerate(row)}
    for _ in range(30):
        context = [rng.randrange(12) for _ in range(rng.randrange(1, 5))]
        voice = voice_after(counted, context, 0.5, 12)
        assert voice.scale + sum(voice.extra.values()) == pytest.approx(1.0)
        for weight in (0.0, 0.4, 1.0):
            shares = interpolated(likely, voice, weight)
            assert sum(shares.values()) == pytest.approx(1.0)
        # With the whole weight it is the voice; with none the row.
        assert shares[3] == pytest.approx(voice.scale * row[3] + voice.extra.get(3, 0.0))
        assert interpolated(likely, voice, 0.0) == {id_: chance for id_, chance in enumerate(row)}
        # What is left out of `likely` changes nothing for the others, where no voice raises it.
        head = {id_: one for id_, one in likely.items() if id_ in voice.extra or id_ % 2}
        assert interpolated(head, voice, 0.4) == pytest.approx(
            {id_: share for id_, share in interpolated(likely, voice, 0.4).items() if id_ in head}
        )
    assert voice_after(counted, [99], 0.5, 12) is SILENT
    assert voice_after(counted, [], 0.5, 12) is SILENT


def test_survivors_are_the_most_probable_of_all_continuations() -> None:
    """Joint probability decides, each sequence brings at most as many as survive, and who has no successor is kept as
    it was when it still was a sequence."""
    beam = Beam(2)
    beam.grow([{5: 0.6, 6: 0.3, 7: 0.1}], frozenset({9}), 0.0)
    assert [(one.token_ids, one.share) for one in beam.sequences] == [([5], 0.6), ([6], 0.3)]
    assert beam.mixture() == ([5, 6], pytest.approx([2 / 3, 1 / 3]))
    beam.grow([{1: 0.5, 2: 0.4, 3: 0.1}, {9: 0.9, 1: 0.1}], frozenset({9}), 0.0)
    assert [one.token_ids for one in beam.sequences] == [[5, 1], [6, 9]]
    assert [one.is_over for one in beam.sequences] == [False, True]
    beam.grow([{1: 0.5, 2: 0.5}], frozenset(), 0.0)
    assert [one.token_ids for one in beam.sequences] == [[6, 9], [5, 1, 1]]
    beam.grow([{1: 0.1}], frozenset(), 0.2)
    assert beam.sequences == [
        Grown(((6, 76), (9, 230)), pytest.approx(0.27), True),
        Grown(((5, 153), (1, 128), (1, 128)), pytest.approx(0.15), True),
    ]
    assert beam.live == []
    other = Beam(2)
    other.grow([{5: 0.5, 6: 0.4}], frozenset(), 0.0)
    other.grow([{1: 0.5, 2: 0.5}, {1: 0.3}], frozenset(), 0.0)
    assert [[token for token, _ in path] for path in other.proposals(5)] == [[5, 1], [5, 2], [6]]


def test_facts_and_options(folder: Path, drafter: SuperposedDrafter, tmp_path: Path) -> None:
    """It is of the draft model's family, tokenizer and limits; a table of another tokenizer is refused with both
    fingerprints, other mistakes by the option's name."""
    assert drafter.model_info is not None
    assert (drafter.family, superposed(folder, family="own").family) == ("neural", "own")
    assert (drafter.model_info.vocab_size, drafter.context_limit) == (VOCAB, CONTEXT)
    assert superposed(folder, context_limit=10).context_limit == 10
    for path, fingerprint in ((tmp_path / "own.npz", drafter.tokenizer_fingerprint), (tmp_path / "other.npz", "else")):
        NgramTable.build([[1, 2, 3]], tokenizer_fingerprint=fingerprint).save(path)
    superposed(folder, table=tmp_path / "own.npz")
    with pytest.raises(ConfigError, match=f"option table: .*else, the draft model has {drafter.tokenizer_fingerprint}"):
        superposed(folder, table=tmp_path / "other.npz")
    with pytest.raises(ConfigError, match="what is served has served"):
        create("superposed", exact(folder), "served")
    for name, value in (
        ("num_sequences", 0), ("num_sequences", 17), ("table_weight", 1.5), ("table_strength", 0),
        ("min_confidence", 2), ("sharpen", 0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=name):
            superposed(folder, **{name: value})
    with pytest.raises(ConfigError, match="needs option model"):
        create("superposed", {})
    with pytest.raises(ConfigError, match="unknown option of drafter kind superposed: stages"):
        superposed(folder, stages="suffix")
    with pytest.raises(ConfigError, match="cannot open n-gram table"):
        superposed(folder, table=tmp_path / "none.npz")


def test_it_can_be_a_stage(folder: Path, drafter: SuperposedDrafter) -> None:
    """As every kind, it answers what may follow its own proposal's beginning, and leaves its session as it was."""
    session: NeuralSession = drafter.open([8, 9, 10], GREEDY)
    whole = drafter.propose([Ask(session, 5)])[0][0].token_ids
    assert drafter.ids_after(session, whole[:2], 3) == whole[2:]
    assert drafter.ids_after(session, [whole[0] ^ 1], 3) == ()
    assert session.cache.length == 3
    drafter.close(session)
