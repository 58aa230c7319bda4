"""Path equality: whatever is drafted, the text is that of plain decoding, id by id. And the suite would notice."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from moot.core.acceptance import Walk, walk
from moot.core.types import ROOT, Draft, SamplingParams
from moot.model.loading.load import LoadedModel
from services.verifier.engine import Engine
from services.verifier.sessions import PendingWork, Session
from services.verifier.step import StepRunner
from services.verifier.walks import Walks, row_of_nodes
from tests.services.verifier.verifier_driver import (
    DraftOf,
    MakeEngine,
    Suite,
    assert_logprobs,
    coverage,
    engine_on,
    make_suite,
    play,
    run,
    texts,
)

NUM_CASES = int(os.environ.get("MOOT_CASES", "10000"))
MAX_K = 8


def check(engine: Engine, suite: Suite, most_accepted: int = MAX_K) -> None:
    assert all(plain.failure is None for plain in suite.plain)
    wrong, results = suite.compare(engine)
    assert wrong == []
    seen = coverage(suite, results)
    wanted = [f"accepted_{number}" for number in range(most_accepted + 1)]
    wanted += ["accepted_later_sibling", "all_accepted", "end_inside", "stop_id_inside", "max_tokens_inside"]
    wanted += ["eos_passed_over", "rounds_without_draft", "greedy", "sampled"]
    missing = [name for name in wanted if not seen[name]]
    assert not missing, seen


@pytest.fixture(scope="module")
def suite(loaded_model: Callable[..., LoadedModel]) -> Suite:
    """Cases with their plain decoding, by the CPU's runner and its sampler, row by row."""
    return make_suite(engine_on(loaded_model()), range(500))


@pytest.mark.parametrize(
    ("paged", "num_cases", "most_accepted"), [(False, 500, MAX_K), (True, 300, MAX_K - 1)], ids=("cpu", "paged")
)
def test_any_draft_leaves_the_text_unchanged(
    make_engine: MakeEngine, suite: Suite, paged: bool, num_cases: int, most_accepted: int
) -> None:
    """C01, C03, C10, C11, C12, C17: drawn cases in float64, eight requests at once: chains, trees, every K, late
    and malicious drafts, moves. On the CPU's way, and on the accelerator's with its paged KV and all rows of a step
    drawn at once."""
    check(make_engine(max_num_seqs=16, paged=paged), suite.head(num_cases), most_accepted)


def test_a_full_pool_changes_nothing(make_engine: MakeEngine, suite: Suite) -> None:
    """With two pages for eight requests at once they wait for each other's pages and fill them anew."""
    engine = make_engine(pages=2, max_num_seqs=8, paged=True)
    assert suite.head(120).compare(engine, mischief=False)[0] == []


def test_logprobs_are_those_of_the_other_way(make_engine: MakeEngine) -> None:
    """Log-probabilities drawn with all rows at once equal those computed along the walk."""
    params = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=12, logprobs=3)
    (expected,) = run(make_engine(), [play([1, 2, 3], params)])
    text = (*expected.output_token_ids, 7)
    draft_of: DraftOf = lambda output: Draft.chain(text[len(output) : len(output) + 4])  # noqa: E731
    (found,) = run(make_engine(paged=True), [play([1, 2, 3], params, draft_of)])
    assert texts([found]) == texts([expected])
    assert_logprobs(found.logprobs, expected.logprobs, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize("block", range(max(1, NUM_CASES // 500)))
def test_any_draft_leaves_the_text_unchanged_in_many_more_cases(make_engine: MakeEngine, block: int) -> None:
    """The same with MOOT_CASES cases (10,000 unless set), other ones than above."""
    engine = make_engine(max_num_seqs=16)
    check(engine, make_suite(engine, range(1000 + block * 500, 1500 + block * 500)))


def wrong_rule(
    *,
    params_at: Callable[[SamplingParams, bool], SamplingParams] = lambda params, _: params,
    path_at: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda path: path,
    position_at: Callable[[int, int], int] = lambda length, depth: length + depth,
    row_at: Callable[[int, int], int] = lambda row, _: row,
    token_of: Callable[[Draft, int, int, object], int] = lambda draft, node, token, row: token,
    ends: Callable[[bool, bool], bool] = lambda is_end, _: is_end,
    more: int = 0,
) -> type[Walks]:
    """Walks that differ from the real one in one place."""

    class Mutant(Walks):
        def walk(self, session: Session, work: PendingWork, logits: object) -> tuple[Walk, list[int]]:
            row_of, draft = row_of_nodes(work), work.draft
            parents = set(draft.parents)
            rows: list[int] = []

            def token_at(node: int, path: tuple[int, ...]) -> int:
                row = row_at(row_of.get(node, 0), len(row_of) - 1)
                rows.append(row)
                params = params_at(session.params, node not in parents)
                token = self._sampler.sample(
                    logits[row],
                    params,
                    position_at(session.length, len(path)),
                    session.history.with_path(path_at(path)),
                )
                return token_of(draft, node, token, logits[row])

            def is_end(token: int, number: int) -> bool:
                return ends(token in session.ending_token_ids, number == 1)

            walked = walk(draft, token_at, is_end, session.max_new + more)
            return walked, rows

    return Mutant


def first_child(draft: Draft, node: int, token: int, row: object) -> int:
    return draft.token_ids[0] if node == ROOT and draft.token_ids else token


def in_the_top_50(draft: Draft, node: int, token: int, row: object) -> int:
    top = row[:259].topk(50).indices.tolist()
    children = [draft.token_ids[child] for child in range(len(draft)) if draft.parents[child] == node]
    return next((child for child in children if child in top), token)


def only_temperature(params: SamplingParams, is_bonus: bool) -> SamplingParams:
    return SamplingParams(temperature=params.temperature, seed=params.seed) if is_bonus else params


def no_min_tokens_inside(params: SamplingParams, is_bonus: bool) -> SamplingParams:
    return params if is_bonus else replace(params, min_tokens=0)


WRONG_RULES = {
    "nothing wrong": wrong_rule(),
    "first draft token unchecked": wrong_rule(token_of=first_child),
    "accepted because in the top 50": wrong_rule(token_of=in_the_top_50),
    "bonus token from unprocessed logits": wrong_rule(params_at=only_temperature),
    "penalties without the path": wrong_rule(path_at=lambda path: ()),
    "penalties behind by one": wrong_rule(path_at=lambda path: path[:-1]),
    "noise of the first position for all": wrong_rule(position_at=lambda length, depth: length),
    "logits shifted by one row": wrong_rule(row_at=lambda row, last: min(row + 1, last)),
    "end inside a draft passed over": wrong_rule(ends=lambda is_end, is_first: is_end and is_first),
    "max_tokens passed over inside a draft": wrong_rule(more=1),
    "min_tokens only at the bonus token": wrong_rule(params_at=no_min_tokens_inside),
}


@pytest.fixture(scope="module")
def some(suite: Suite) -> Suite:
    """The cases that the wrong rules are tried on."""
    return suite.head(80)


def compare_with(
    engine: Engine, suite: Suite, walks: type[Walks] = Walks, steps: type[StepRunner] = StepRunner
) -> list[int]:
    real = engine.serving.steps
    made = walks(real.walks._sampler, real.walks._progress)
    engine.serving.steps = steps(real._runner, made, real._progress)
    try:
        return suite.compare(engine, mischief=False)[0]
    finally:
        engine.serving.steps = real


@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_noticed(make_engine: MakeEngine, some: Suite, name: str) -> None:
    """Each wrong rule of the walk makes some case part from plain decoding; the right one, none."""
    engine = make_engine()
    wrong = compare_with(engine, some, walks=WRONG_RULES[name])
    assert bool(wrong) == (name != "nothing wrong")


class WrongPathKept(StepRunner):
    """Keeps the first fed tokens in the cache instead of those on the accepted path."""

    def _advance(self, item, logits):  # type: ignore[no-untyped-def]
        cache = item.session.cache
        commit = cache.commit

        def commit_first(kept: Sequence[int]) -> None:
            length = cache.length
            pending = cache.pending
            commit(kept)
            if pending is not None and pending.tree_kv is not None:
                count = len(kept)
                cache.data[:, :, length : length + count] = pending.tree_kv[:, :, :count]

        cache.commit = commit_first
        try:
            return super()._advance(item, logits)
        finally:
            del cache.commit


class PositionsBehind(StepRunner):
    """Feeds the draft as if one accepted token fewer stood before it."""

    def _advance(self, item, logits):  # type: ignore[no-untyped-def]
        outcome = super()._advance(item, logits)
        cache = item.session.cache
        if cache.length > 2 and item.completes and item.num_tokens > 1:
            cache.data[:, :, cache.length - 1] = cache.data[:, :, cache.length - 2]
        return outcome


class HistoryWithRejected(StepRunner):
    """Counts rejected draft tokens for penalties."""

    def _advance(self, item, logits):  # type: ignore[no-untyped-def]
        work = item.session.work
        outcome = super()._advance(item, logits)
        if item.completes and work is not None:
            accepted = set(outcome.walk.accepted_nodes) if hasattr(outcome, "walk") else set()
            item.session.history.append(
                token for node, token in enumerate(work.draft.token_ids) if node not in accepted
            )
        return outcome


class RowsMixedUp(StepRunner):
    """Gives each request the logits of the next one in the batch."""

    def _forward(self, items):  # type: ignore[no-untyped-def]
        results = super()._forward(items)
        rows = [result for _, result in results]
        same = [index for index, row in enumerate(rows) if row.shape == rows[0].shape]
        moved = dict(zip(same, [*same[1:], same[0]], strict=True))
        return [(item, rows[moved.get(index, index)]) for index, (item, _) in enumerate(results)]


@pytest.mark.parametrize("rule", [WrongPathKept, PositionsBehind, HistoryWithRejected, RowsMixedUp])
def test_wrong_state_after_a_round_is_noticed(make_engine: MakeEngine, some: Suite, rule: type[StepRunner]) -> None:
    """A cache or history that holds rejected tokens, or another request's row, makes some case part."""
    engine = make_engine()
    assert compare_with(engine, some, steps=rule)
