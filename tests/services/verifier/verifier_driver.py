"""Engines, and scripted requests played against them: many at once, step by step, the same way on every run."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from moot.core.errors import InvalidRequest
from moot.core.options import make_config
from moot.core.types import ROOT, Draft, FinishReason, Proposal, SamplingParams, TokenLogprobs, Verification
from moot.model.backend import plain_runner
from moot.model.cache.contiguous import PAGE_SLOTS
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.loading.load import LoadedModel
from moot.model.runner import ModelRunner
from services.verifier.commands import Abort, Answer, Command, Failed, Open, Opened, Verified, Verify
from services.verifier.config import VerifierConfig
from services.verifier.engine import Engine
from services.verifier.sessions import Session

MAX_STEPS = 20_000
session_ids = itertools.count(1)

MakeEngine = Callable[..., Engine]
DraftOf = Callable[[tuple[int, ...]], Draft]


def engine_on(
    loaded: LoadedModel, *, pages: int = 64, batch_invariant: bool = False, paged: bool = False, **options: Any
) -> Engine:
    """An engine of its own cache and limits. `paged`: by the accelerator's way, on the CPU."""
    size = pages * PAGE_SLOTS
    runner: ModelRunner = (
        GpuRunner(loaded, size, batch_invariant, use_graphs=True)
        if paged
        else plain_runner(loaded, size, batch_invariant)
    )
    return Engine(runner, make_config(VerifierConfig, model="tiny", **options))


def preempted_by(engine: Engine) -> list[Session]:
    """A list that gets every session that loses its slots."""
    preempted: list[Session] = []
    rearrange = engine.serving.scheduler.rearrange

    def watched() -> Any:
        changes = rearrange()
        preempted.extend(changes.preempted)
        return changes

    engine.serving.scheduler.rearrange = watched  # type: ignore[method-assign]
    return preempted


@dataclass
class Result:
    """One finished request. `drafts[i]` is what `verifications[i]` answered (an empty one for openings)."""

    output_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    failure: Failed | None = None
    verifications: list[Verification] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(entry for one in self.verifications for entry in one.logprobs)


Play = Generator[list[Command], Answer, Result]
Text = tuple[tuple[int, ...], FinishReason | None]


def texts(results: Iterable[Result]) -> list[Text]:
    """Ids and end reason of each; none has failed."""
    found = []
    for result in results:
        assert result.failure is None
        found.append((result.output_token_ids, result.finish_reason))
    return found


def assert_logprobs(ours: Sequence[TokenLogprobs], theirs: Sequence[TokenLogprobs], within: float) -> None:
    """One of ours for each of theirs: the same ranks and alternatives."""
    assert [one.logprob for one in ours] == pytest.approx([one.logprob for one in theirs], abs=within)
    assert [one.rank for one in ours] == [one.rank for one in theirs]
    assert [[token_id for token_id, _ in one.top] for one in ours] == [[x for x, _ in one.top] for one in theirs]


def tree_of(proposals: Sequence[Proposal]) -> Draft:
    """All proposals in one draft."""
    nodes: dict[tuple[int, ...], int] = {(): ROOT}
    parents: list[int] = []
    for proposal in proposals:
        for end in range(1, len(proposal.token_ids) + 1):
            path = proposal.token_ids[:end]
            if path not in nodes:
                nodes[path] = len(parents)
                parents.append(nodes[path[:-1]])
    return Draft(tuple(path[-1] for path in list(nodes)[1:]), tuple(parents))


def play(
    prompt: Sequence[int],
    params: SamplingParams,
    draft_of: DraftOf = lambda _: Draft(),
    *,
    committed: Sequence[int] = (),
    request_id: str = "test",
    cache_salt: str = "",
    mischief: random.Random | None = None,
    **wish: Any,
) -> Play:
    """One request as a router would drive it: yields commands, is sent the answer, returns the result.

    With a `wish`, which is of drafters attached to the verifier (fields of `Open`), every round verifies what came with
    the last answer, in place of `draft_of`.
    With `mischief`: late and doubled commands, malformed drafts (the session fails, the request goes on in a new one
    with its committed tokens), and moves to a new session.
    """
    result = Result(output_token_ids=tuple(committed))
    farewell: list[Command] = []
    while True:
        session_id = next(session_ids)
        opening = Open(session_id, request_id, tuple(prompt), params, result.output_token_ids, cache_salt, **wish)
        answer, round_index, previous = (yield [*farewell, opening]), 0, None
        farewell.clear()
        draft = Draft()
        while True:
            if isinstance(answer, Failed):
                expected = mischief is not None and answer.error is InvalidRequest
                if not expected:
                    result.failure = answer
                    return result
                break
            assert isinstance(answer, Opened if round_index == 0 else Verified)
            assert answer.session_id == session_id
            base = len(prompt) + len(result.output_token_ids)
            assert answer.verification.base_length == base
            result.verifications.append(answer.verification)
            result.drafts.append(draft)
            result.output_token_ids += answer.verification.output_token_ids
            result.finish_reason = answer.verification.finish_reason
            if result.finish_reason is not None:
                assert answer.verification.proposals == ()
                return result
            base += len(answer.verification.output_token_ids)
            commands: list[Command] = []
            kind = mischief.random() if mischief else 1.0
            if kind < 0.05:
                # A move: the old session is given up between two rounds, the abort travels with the next opening.
                farewell.append(Abort(session_id))
                break
            if kind < 0.15 and previous is not None:
                commands.append(previous)
            round_index += 1
            draft = tree_of(answer.verification.proposals) if wish else draft_of(result.output_token_ids)
            if 0.15 <= kind < 0.2:
                draft = malformed(mischief, draft)
            previous = Verify(session_id, round_index, base, draft, opening.num_inside_tokens)
            answer = yield [*commands, previous]


def malformed(draw: random.Random, draft: Draft) -> Draft:
    """A draft that must be refused: ids in the padding or far outside, parents that do not come before."""
    token_ids = draft.token_ids or (1, 2)
    chain = Draft.chain(token_ids)
    kind = draw.randrange(4)
    if kind == 0:
        return Draft.chain((*token_ids[:-1], draw.choice([259, 299, 300, 2**32 - 1])))
    if kind == 1:
        return Draft(token_ids, (*chain.parents[:-1], len(token_ids)))
    if kind == 2:
        return Draft(token_ids, chain.parents[:-1])
    return Draft((7, 7), (ROOT, ROOT))


def run(
    engine: Engine, plays: Iterable[Play], at_once: int = 8, before_step: Callable[[int], None] = lambda number: None
) -> list[Result]:
    """Play all, `at_once` at a time, stepping `engine` by hand. Fails when it takes absurdly many steps."""
    queue = list(enumerate(plays))[::-1]
    results: dict[int, Result] = {}
    inbox: list[Answer] = []
    stream = engine.connect(inbox.extend)
    active: dict[int, tuple[int, Play]] = {}

    def advance(index: int, one: Play, answer: Answer | None) -> None:
        try:
            commands = next(one) if answer is None else one.send(answer)
        except StopIteration as stop:
            results[index] = stop.value
            return
        active[commands[-1].session_id] = (index, one)
        engine.submit(stream, commands)

    for number in range(MAX_STEPS):
        while queue and len(active) < at_once:
            advance(*queue.pop(), None)
        if not active and not queue:
            break
        before_step(number)
        engine.step()
        answers, inbox[:] = list(inbox), []
        for answer in answers:
            advance(*active.pop(answer.session_id), answer)
    else:
        raise AssertionError("the engine does not get the work done")
    engine.disconnect(stream)
    engine.step()
    return [results[index] for index in sorted(results)]


@dataclass(frozen=True)
class Script:
    """A drafter that knows the true continuation and corrupts it at drawn places.

    `text`: true output ids and whatever may follow them. Each call draws K (0..max_k), a chain or a tree, and whether
    and where the true path is broken.
    """

    text: tuple[int, ...]
    max_k: int
    draw: random.Random
    vocab_size: int = 259
    break_chance: float = 0.6

    def __call__(self, output: tuple[int, ...]) -> Draft:
        k = self.draw.randint(0, self.max_k)
        true = self.text[len(output) : len(output) + k]
        broken = self.draw.randrange(len(true)) if true and self.draw.random() < self.break_chance else None
        if self.draw.random() < 0.5:
            return self._chain(true, broken)
        return self._tree(true, broken)

    def _wrong(self, token_id: int) -> int:
        return (token_id + self.draw.randrange(1, self.vocab_size)) % self.vocab_size

    def _chain(self, true: tuple[int, ...], broken: int | None) -> Draft:
        ids = list(true)
        if broken is not None:
            ids[broken] = self._wrong(ids[broken])
        return Draft.chain(tuple(ids))

    def _tree(self, true: tuple[int, ...], broken: int | None) -> Draft:
        """The true path with wrong siblings, some of them before it, some with the true tail as their own children."""
        nodes: list[tuple[int, int]] = []
        parent = ROOT
        for depth, token_id in enumerate(true):
            wrong = {self._wrong(token_id) for _ in range(self.draw.randrange(3))}
            for other in wrong:
                nodes.append((parent, other))
                if self.draw.random() < 0.5 and depth + 1 < len(true):
                    nodes.append((len(nodes) - 1, true[depth + 1]))
            if depth == broken:
                break
            nodes.append((parent, token_id))
            parent = len(nodes) - 1
        return Draft(tuple(token_id for _, token_id in nodes), tuple(parent for parent, _ in nodes))


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_k: int


def draw_case(seed: int, vocab_size: int = 259) -> Case:
    """One case; every feature of the sampler is on in some, and half of them are greedy."""
    draw = random.Random(seed)
    prompt = tuple(draw.randrange(vocab_size - 3) for _ in range(draw.choice([1, 2, 5, 17, 40])))
    maybe = lambda chance: draw.random() < chance  # noqa: E731
    max_tokens = draw.choice([1, 2, 3, 5, 8, 13, 20, 30])
    params = SamplingParams(
        temperature=0.0 if maybe(0.5) else draw.choice([0.3, 0.8, 1.0, 1.5]),
        top_k=draw.choice([1, 3, 20, 200]) if maybe(0.3) else 0,
        top_p=draw.choice([0.3, 0.9, 0.99]) if maybe(0.3) else 1.0,
        min_p=draw.choice([0.02, 0.2]) if maybe(0.25) else 0.0,
        repetition_penalty=draw.choice([1.3, 2.0, 0.8]) if maybe(0.3) else 1.0,
        presence_penalty=draw.choice([0.7, -0.5]) if maybe(0.25) else 0.0,
        frequency_penalty=draw.choice([0.4, -0.6]) if maybe(0.25) else 0.0,
        logit_bias={draw.randrange(vocab_size): draw.uniform(-8, 8) for _ in range(5)} if maybe(0.3) else {},
        allowed_token_ids=frozenset(draw.sample(range(vocab_size), 40)) if maybe(0.1) else None,
        max_tokens=max_tokens,
        min_tokens=draw.randint(0, max_tokens) if maybe(0.4) else 0,
        ignore_eos=maybe(0.3),
        seed=draw.getrandbits(64),
    )
    return Case(prompt, params, seed, draw.choice([0, 1, 3, 4, 8]))


FEW_IDS = (60, 61, 62, 63, 64)
NUM_TOKENS = 4


def wish(*drafter_ids: str, width: int = 1, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """Fields of an opening that wants proposals of drafters attached to the verifier."""
    return {"inside_drafter_ids": drafter_ids, "inside_width": width, "num_inside_tokens": num_tokens}


def attached_cases(number: int) -> list[Case]:
    """Drawn ones, each also with few allowed ids, among which guesses are often right."""
    found = []
    for seed in range(number):
        case = draw_case(seed)
        params = replace(case.params, max_tokens=12, min_tokens=0)
        found.append(replace(case, params=params))
        found.append(replace(case, params=replace(params, allowed_token_ids=frozenset(FEW_IDS), logit_bias={})))
    return found


def drafted_as_plain(
    plain: Engine, engine: Engine, cases: Sequence[Case], wish_of: Callable[[int], dict[str, Any]]
) -> list[Result]:
    """What comes of the cases on `engine`, each with its wish of drafters; their texts are those of `plain`."""
    expected = run(plain, [play(case.prompt, case.params) for case in cases])
    results = run(engine, [play(case.prompt, case.params, **wish_of(index)) for index, case in enumerate(cases)])
    assert texts(results) == texts(expected)
    return results


def with_ending(case: Case, text: Sequence[int], end_token_id: int) -> Case:
    """Let the text end inside: a stop id that it holds, or an end token made likely."""
    draw = random.Random(case.seed + 1)
    kind = draw.random()
    if kind < 0.35 and text:
        stop = frozenset({draw.choice(list(text)), draw.randrange(256)})
        return replace(case, params=replace(case.params, stop_token_ids=stop))
    if kind < 0.6:
        bias = {**case.params.logit_bias, end_token_id: draw.uniform(10, 40)}
        allowed = case.params.allowed_token_ids
        allowed = allowed | {end_token_id} if allowed is not None else None
        return replace(case, params=replace(case.params, logit_bias=bias, allowed_token_ids=allowed))
    return case


@dataclass
class Suite:
    """Cases with the text of plain decoding for each; `compare` plays them with drafts."""

    cases: list[Case]
    plain: list[Result]

    def head(self, count: int) -> Suite:
        """The first so many of its cases."""
        return Suite(self.cases[:count], self.plain[:count])

    def compare(self, engine: Engine, *, mischief: bool = True, at_once: int = 8) -> tuple[list[int], list[Result]]:
        """Seeds of the cases whose text is not that of plain decoding, and all results."""
        plays = []
        for case, plain in zip(self.cases, self.plain, strict=True):
            draw = random.Random(case.seed + 2)
            # Drafts run on past the end of the text, so that ends lie inside them.
            text = plain.output_token_ids + tuple(draw.randrange(256) for _ in range(12))
            script = Script(text, case.max_k, draw)
            plays.append(play(case.prompt, case.params, script, mischief=draw if mischief else None))
        results = run(engine, plays, at_once)
        wrong = [
            case.seed
            for case, plain, result in zip(self.cases, self.plain, results, strict=True)
            if (result.output_token_ids, result.finish_reason, result.failure)
            != (plain.output_token_ids, plain.finish_reason, plain.failure)
        ]
        return wrong, results


def make_suite(engine: Engine, seeds: Iterable[int], draw: Callable[[int], Case] = draw_case) -> Suite:
    """Draw the cases and decode each plainly, alone or beside others as the engine likes."""
    cases = [draw(seed) for seed in seeds]
    free = [replace(case.params, ignore_eos=True, min_tokens=0, stop_token_ids=frozenset()) for case in cases]
    probes = run(engine, [play(case.prompt, params) for case, params in zip(cases, free, strict=True)])
    (end_token_id,) = engine.info.end_token_ids
    cases = [with_ending(case, probe.output_token_ids, end_token_id) for case, probe in zip(cases, probes, strict=True)]
    return Suite(cases, run(engine, [play(case.prompt, case.params) for case in cases]))


def depth_of(draft: Draft, node: int) -> int:
    return 0 if draft.parents[node] == ROOT else depth_of(draft, draft.parents[node]) + 1


def coverage(suite: Suite, results: Sequence[Result]) -> Counter[str]:
    """What happened, counted: the suite proves something only if all of it did."""
    seen: Counter[str] = Counter()
    for case, result in zip(suite.cases, results, strict=True):
        params = case.params
        seen["greedy" if params.is_greedy else "sampled"] += 1
        for one, draft in zip(result.verifications, result.drafts, strict=True):
            if not draft.token_ids:
                # Openings are without a draft, too: only rounds after the first answer count.
                seen["rounds_without_draft"] += one is not result.verifications[0]
                continue
            seen[f"accepted_{one.num_accepted}"] += 1
            depth = max(depth_of(draft, node) for node in range(len(draft))) + 1
            node = ROOT
            for token_id in one.output_token_ids[: one.num_accepted]:
                children = [child for child in range(len(draft)) if draft.parents[child] == node]
                node = next(child for child in children if draft.token_ids[child] == token_id)
                seen["accepted_later_sibling"] += children[0] != node
            if one.num_accepted == depth:
                seen["all_accepted"] += 1
            attached = one.num_accepted < depth and one.num_accepted == len(one.output_token_ids)
            last = one.output_token_ids[-1] if one.output_token_ids else -1
            if one.finish_reason is FinishReason.STOP and attached:
                seen["stop_id_inside" if last in params.stop_token_ids else "end_inside"] += 1
            if one.finish_reason is FinishReason.LENGTH and attached:
                seen["max_tokens_inside"] += 1
            if params.ignore_eos and 258 in one.output_token_ids[: one.num_accepted] and one.finish_reason is None:
                seen["eos_passed_over"] += 1
    return seen
