"""Path equality over all kinds, stages and shapes: the text is plain decoding's, whatever is drafted. It can fail."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from moot.core.acceptance import Walk, walk
from moot.core.types import ROOT
from services.verifier.engine import Engine
from services.verifier.sessions import PendingWork, Session
from services.verifier.step import StepRunner
from services.verifier.walks import Walks, row_of_nodes
from tests.paths.path_checks import check_choice
from tests.paths.path_coverage import Findings, missing
from tests.paths.path_drawing import CASES_PER_SYSTEM, TARGETS, draw_case, draw_system
from tests.paths.path_peers import House
from tests.paths.path_play import Played, play_all

pytestmark = pytest.mark.timeout(900)  # of cases that are played for many tests at once

NUM_CASES = 500
NUM_MORE = int(os.environ.get("MOOT_CASES", "10000"))


class Suite(NamedTuple):
    """One house on one event loop, which runs while a test plays."""

    house: House
    runner: asyncio.Runner


@pytest.fixture(scope="session")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Suite]:
    with asyncio.Runner() as runner:
        house = House(tmp_path_factory.mktemp("paths"))
        yield Suite(house, runner)
        runner.run(house.__aexit__())


@pytest.fixture(scope="session")
def findings(suite: Suite) -> Findings:
    """The first cases, played once for all tests that look at them."""
    return suite.runner.run(Findings().play(suite.house, range(NUM_CASES)))


@pytest.mark.parametrize("target", [spec.name for spec in TARGETS])
def test_whatever_is_drafted_the_text_is_plain_decodings(findings: Findings, target: str) -> None:
    """C01, C04, C30: 500 drawn cases, verified ten at a time: ids, text, end and logprobs are plain decoding's bit by
    bit, counters add up, and afterwards nobody holds anything of them."""
    own = Findings([played for played in findings.played if played.case.system.target.name == target])
    assert len(own.played) > 50
    assert not own.wrong, own.wrong


def test_the_cases_are_of_every_sort(findings: Findings) -> None:
    """Every kind is heard and right, every vote, shape, weight, length and depth of stages has drafts accepted."""
    assert not missing(findings.seen), findings.seen


@pytest.mark.long
@pytest.mark.parametrize("block", range(max(1, NUM_MORE // 500)))
def test_the_same_in_many_more_cases(suite: Suite, block: int) -> None:
    """MOOT_CASES cases (10,000 unless set), other ones than above."""
    first = 1000 + 500 * block
    found = suite.runner.run(Findings().play(suite.house, range(first, first + 500)))
    assert not found.wrong, found.wrong
    assert not missing(found.seen), found.seen


def test_a_case_is_drawn_from_its_number_alone() -> None:
    """The same number gives the same case, so that a wrong one can be played again; another number, another one."""
    for number in random.Random(0).sample(range(100_000), 20):
        assert draw_case(number) == draw_case(number)
        assert draw_case(number) != draw_case(number + 1)
        assert draw_case(number).system == draw_system(number // CASES_PER_SYSTEM)


def wrong_walks(
    *,
    token_of: Callable[[PendingWork, int, int], int] = lambda work, node, token: token,
    path_at: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda path: path,
    position_at: Callable[[int, int], int] = lambda length, depth: length + depth,
    kept: Callable[[PendingWork, Walk], Walk] = lambda work, walked: walked,
    ends: Callable[[bool, int], bool] = lambda is_end, number: is_end,
    rows_of: Callable[[list[int]], list[int]] = lambda rows: rows,
) -> type[Walks]:
    """Walks that differ from the real ones in one place."""

    class Mutant(Walks):
        def walk(self, session: Session, work: PendingWork, logits: Any) -> tuple[Walk, list[int]]:
            row_of = row_of_nodes(work)
            rows: list[int] = []

            def token_at(node: int, path: tuple[int, ...]) -> int:
                rows.append(row_of[node])
                history = session.history.with_path(path_at(path))
                position = position_at(session.length, len(path))
                token = self._sampler.sample(logits[row_of[node]], session.params, position, history)
                return token_of(work, node, token)

            walked = walk(
                work.draft,
                token_at,
                lambda token, number: ends(token in session.ending_token_ids, number),
                session.max_new,
            )
            return kept(work, walked), rows_of(rows)

    return Mutant


def unchecked(work: PendingWork, node: int, token: int) -> int:
    """The first draft token is accepted unseen."""
    return work.draft.token_ids[0] if node == ROOT and work.draft.token_ids else token


def one_wrong_below(work: PendingWork, node: int, token: int) -> int:
    """The third token of a chain is accepted where its parent was."""
    return work.draft.token_ids[2] if node == 1 and len(work.draft) > 2 and work.draft.parents[2] == 1 else token


def siblings_row(work: PendingWork, walked: Walk) -> Walk:
    """Where an accepted token has a sibling, that one's keys and values are kept."""
    draft = work.draft

    def other(node: int) -> int:
        alike = [one for one in range(len(draft)) if draft.parents[one] == draft.parents[node] and one != node]
        return alike[0] if alike else node

    return replace(walked, accepted_nodes=tuple(map(other, walked.accepted_nodes)))


WRONG_WALKS = {
    "nothing wrong": wrong_walks(),
    "first draft token unchecked": wrong_walks(token_of=unchecked),
    "third draft token unchecked": wrong_walks(token_of=one_wrong_below),
    "a sibling's row kept in the cache": wrong_walks(kept=siblings_row),
    "penalties without the path": wrong_walks(path_at=lambda path: ()),
    "noise of the first position for all": wrong_walks(position_at=lambda length, depth: length),
    "an end inside a draft passed over": wrong_walks(ends=lambda is_end, number: is_end and number == 1),
    "logprobs behind by one": wrong_walks(rows_of=lambda rows: [rows[0], *rows[:-1]] if rows else rows),
}
MUTATED = [number for number in range(0, 1000, CASES_PER_SYSTEM) if draw_case(number).system.target == TARGETS[0]]
"""First cases of the systems over the target that starts fastest."""


class Caught(Exception):
    """No more cases are needed."""


def num_until_caught(suite: Suite, change: Callable[[Engine], None], most: int) -> int | None:
    """How many cases were played until one was wrong, at most `most`; None: none was."""
    num_played = 0

    def note(played: Played) -> None:
        nonlocal num_played
        num_played += 1
        if played.problems:
            raise Caught

    async def main() -> None:
        await suite.house.change_targets(change)
        numbers = [number for first in MUTATED for number in range(first, first + CASES_PER_SYSTEM)]
        await play_all(suite.house, numbers[:most], note)

    try:
        suite.runner.run(main())
    except Caught:
        return num_played
    return None


@pytest.mark.parametrize("name", WRONG_WALKS)
def test_a_wrong_rule_is_caught_within_the_first_cases(suite: Suite, name: str) -> None:
    """A verifier that goes wrong in one place is found out by some dozens of cases; the walk that these differ from is
    not."""

    def change(engine: Engine) -> None:
        real = engine.serving.steps
        walks = WRONG_WALKS[name](real.walks._sampler, real.walks._progress)
        engine.serving.steps = StepRunner(real._runner, walks, real._progress, real._keeps_states)

    if name == "nothing wrong":
        assert num_until_caught(suite, change, 30) is None
    else:
        assert num_until_caught(suite, change, 200) is not None


def test_what_a_request_leaves_behind_is_caught(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verifier that now and then keeps the cache of a session that has ended is found out by its first ten cases."""

    def change(engine: Engine) -> None:
        end = engine.serving._end

        def forgetful(session: Session) -> None:
            if session.length % 3 == 0:
                session.cache.free = lambda: None  # type: ignore[method-assign]
            end(session)

        engine.serving._end = forgetful  # type: ignore[method-assign]

    monkeypatch.setattr(suite.house, "patience_s", 1.0)
    assert num_until_caught(suite, change, CASES_PER_SYSTEM) is not None


def test_counts_that_do_not_add_up_are_caught(findings: Findings) -> None:
    """The next token counted as accepted, a position too many, more accepted than drafted: each is a problem."""
    played = next(
        one for one in findings.played for outcome in one.outcomes if outcome.last.metrics.num_accepted_tokens
    )
    outcome = next(one for one in played.outcomes if one.last.metrics.num_accepted_tokens)
    assert not check_choice(outcome, played.case)
    good = outcome.last.metrics
    for bad in (
        replace(good, num_accepted_tokens=good.num_accepted_tokens + 1),
        replace(good, num_accepted_tokens_per_position=(*good.num_accepted_tokens_per_position, 1)),
        replace(good, num_draft_tokens=good.num_accepted_tokens - 1),
        replace(good, num_rounds=good.num_rounds + 2),
    ):
        assert check_choice(replace(outcome, last=replace(outcome.last, metrics=bad)), played.case)
