"""Plays cases: a real router over the peers of path_peers, all cases of a system at once, plain decoding beside."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from moot.core.options import make_config
from moot.core.types import ModelInfo, TokenLogprobs
from moot.runtime.metrics import Metrics
from moot.tokenizer import load_tokenizer, tokenizer_fingerprint
from services.router.api.choices import encode_prompts
from services.router.api.requests import BodyReader, Checked, plan_requests
from services.router.api.text import IncrementalText
from services.router.api.tokenization import PromptTokenizer
from services.router.config import RouterConfig
from services.router.generation.request_types import GenerationChunk, GenerationRequest
from services.router.generation.rounds import Rounds, ServedModel
from services.router.lifecycle import Peers
from services.router.peers.local_drafters import LocalPool
from services.router.store import MemoryStore
from tests.paths.path_checks import Expected, check_choice, check_counters, expect
from tests.paths.path_drawing import LOCAL, PODS, Case, System, draw_case
from tests.paths.path_peers import House
from tests.paths.path_plain import Plain
from tests.waiting import GIVE_UP_S, eventually


@dataclass
class Outcome:
    """What the client of one choice got."""

    request: GenerationRequest
    plain: Plain
    expected: Expected
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    last: GenerationChunk | None = None


@dataclass
class Played:
    """One case and what was wrong with it."""

    case: Case
    outcomes: list[Outcome] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    heard: set[str] = field(default_factory=set)
    """Drafters that proposed something, well-formed or not; of the latter, in any case of the system."""


@dataclass
class Front:
    """A router without its HTTP server: bodies are read, choices planned and rounds run by its own code."""

    config: RouterConfig
    prompts: PromptTokenizer
    peers: Peers
    rounds: Rounds
    metrics: Metrics

    @property
    def info(self) -> ModelInfo:
        info = self.peers.model_info()
        assert info is not None
        return info

    async def requests(self, case: Case) -> tuple[GenerationRequest, ...]:
        """As the API makes them, one per choice."""
        info = self.info
        reader = BodyReader(self.config.http, info, self.peers.drafter_ids())
        checked: Checked[Any] = reader.chat(case.body) if case.is_chat else reader.completion(case.body)
        prompts, _ = await encode_prompts(self.prompts, checked.body, info.context_limit, "prompt")
        return plan_requests(checked, prompts, info, f"case-{case.number}", "", "", "prompt")

    async def generate(self, outcome: Outcome) -> None:
        request = outcome.request
        assembler = IncrementalText.of(request, self.prompts.tokens, self.info.end_token_ids)
        async with asyncio.timeout(GIVE_UP_S):
            async for chunk in self.rounds.generate(request, assembler):
                outcome.token_ids += chunk.token_ids
                outcome.text += chunk.text
                outcome.logprobs += chunk.logprobs
                outcome.last = chunk

    def malformed(self) -> set[str]:
        """Drafters of which some proposals could not be used."""
        return {
            sample.labels["drafter"]
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "moot_proposals_dropped_total" and sample.value
        }

    def left(self) -> dict[str, int]:
        """What is still held of requests, by where."""
        peers = self.peers
        links = [link for pool in peers.pools.values() for link in pool.links.values()]
        local = [source for source in peers.drafter_set.sources.values() if isinstance(source, LocalPool)]
        found = {
            "requests running": self.rounds.num_running,
            "verifier links": sum(link.load + link.pool.num_held for link in peers.targets.all_links),
            "drafter links": sum(link.load for link in links),
            "drafters in the router": sum(source.num_sessions for source in local),
            "pool depth": int(self.metrics.registry.get_sample_value("moot_pool_depth") or 0),
        }
        return {what: count for what, count in found.items() if count}


@asynccontextmanager
async def front(house: House, system: System) -> AsyncIterator[Front]:
    target = await house.served(system.target)
    pods = [f"{name}={(await house.pod(name)).address}" for name in system.drafter_set if name in PODS]
    config = make_config(
        RouterConfig,
        model=str(house.model(system.target)),
        served_model_name=("tiny",),
        verifiers=(target.address,),
        drafters=tuple(pods),
        in_process_drafters=tuple([await house.local(name) for name in system.drafter_set if name in LOCAL]),
        backoff_min_s=0.01,
        **system.settings,
    )
    tokenizer = load_tokenizer(config.model)
    metrics = Metrics("router")
    peers = Peers(config, tokenizer, metrics)
    model = ServedModel("tiny", tokenizer_fingerprint(tokenizer))
    rounds = Rounds(peers.targets, peers.drafter_set, MemoryStore(), model, metrics, config.max_buffered_commits)
    prompts = PromptTokenizer(tokenizer, dataclasses.replace(config.http, tokenize_timeout_s=GIVE_UP_S))
    try:
        peers.start()
        await eventually(lambda: peers.targets.is_available)
        await eventually(lambda: all(pool.is_available for pool in peers.pools.values()))
        yield Front(config, prompts, peers, rounds, metrics)
    finally:
        prompts.close()
        await peers.close()


async def play(house: House, cases: Sequence[Case]) -> list[Played]:
    """The cases of one system, all at once."""
    (system,) = {case.system.number: case.system for case in cases}.values()
    done = [Played(case) for case in cases]
    async with front(house, system) as router:
        await _plan(house, router, done)
        await asyncio.gather(*(_generate(router, played) for played in done))

        def left() -> dict[str, int]:
            return router.left() | house.left(system.drafter_set, system.target)

        try:
            await eventually(lambda: not left(), house.patience_s)
        except TimeoutError:
            done[-1].problems.append(f"left behind by the system's cases: {left()}")
        malformed = router.malformed()
        for played in done:
            told = [outcome.last.metrics for outcome in played.outcomes if outcome.last and outcome.last.metrics]
            played.heard = {name for one in told for name in one.drafters} | (malformed & set(played.case.drafters))
        whole = [played for played in done if played.outcomes and not played.problems]
        for played in whole:
            for outcome in played.outcomes:
                played.problems += check_choice(outcome, played.case)
        if len(whole) == len(done):
            done[-1].problems += check_counters(router.metrics, [one for played in done for one in played.outcomes])
    return done


async def _plan(house: House, router: Front, done: Sequence[Played]) -> None:
    """Requests, and plain decoding of them; first without their endings, which are taken from that text."""
    plain = house.plain(done[0].case.system.target)
    requests = [await router.requests(played.case) for played in done]
    probes = await plain.decode([(own[0].prompt_token_ids, own[0].params) for own in requests])
    for index, (played, probe) in enumerate(zip(done, probes, strict=True)):
        body = played.case.body | ending(played.case, probe.token_ids)
        requests[index] = await router.requests(dataclasses.replace(played.case, body=body))
    answers = iter(await plain.decode([(one.prompt_token_ids, one.params) for own in requests for one in own]))
    for played, own in zip(done, requests, strict=True):
        for request in own:
            answer = next(answers)
            house.known[request.params.seed] = (len(request.prompt_token_ids), answer.token_ids)
            predicted = prediction(played.case, answer.token_ids)
            request = dataclasses.replace(request, prediction_token_ids=predicted)
            played.outcomes.append(Outcome(request, answer, expect(request, answer, router.info.end_token_ids)))


def ending(case: Case, output: Sequence[int]) -> dict[str, Any]:
    """Fields of the body that end the text early, where it can be."""
    place = int(case.place * len(output))
    if case.ending == "stop_token":
        return {"stop_token_ids": [output[place], 7]}
    if case.ending == "end_likely":
        return {"logit_bias": {**case.body.get("logit_bias", {}), "258": 4 + 30 * case.place}}
    text = "".join(chr(id_) for id_ in output[place : place + 2] if 0x20 <= id_ < 0x7F)
    return {"stop": [text, text[:1] + "~~"]} if case.ending == "stop_string" and text else {}


def prediction(case: Case, output: Sequence[int]) -> tuple[int, ...]:
    """What the client expects: the text, wrong at some places, where one id is missing, or one too many."""
    if case.prediction is None:
        return ()
    ids = list(output)
    for share in case.prediction:
        place = int(share * len(ids))
        ids[place : place + 1] = [97, 98] if share < 0.5 else []
    return tuple(ids)


async def _generate(router: Front, played: Played) -> None:
    first, *others = played.outcomes
    try:
        if played.case.is_staggered:
            await router.generate(first)
            await asyncio.gather(*(router.generate(outcome) for outcome in others))
        else:
            await asyncio.gather(*(router.generate(outcome) for outcome in played.outcomes))
    except Exception:  # noqa: BLE001 - the case is wrong; the others go on
        played.problems.append(traceback.format_exc())


async def play_all(
    house: House, numbers: Iterable[int], on_played: Callable[[Played], None], *, is_alone: bool = False
) -> None:
    """Systems one after the other. `is_alone`: each case without its neighbours."""
    cases = [draw_case(number) for number in numbers]
    for _, own in itertools.groupby(cases, lambda case: case.number if is_alone else case.system.number):
        batched = list(own)
        try:
            done = await play(house, batched)
        except Exception as error:
            error.add_note(f"while playing system {batched[0].system.number}")
            raise
        for played in done:
            on_played(played)


def describe(played: Played) -> str:
    """A case that is wrong, and how to play it again."""
    case = played.case
    lines = [
        f"case {case.number} of system {case.system.number} is wrong; again:"
        f" python -m tests.paths --case {case.number},"
        f" with its neighbours: python -m tests.paths --system {case.system.number}",
        f"  target {case.system.target.name}, drafter set {', '.join(case.system.drafter_set)}",
        f"  settings {case.system.settings}",
        f"  body {case.body}",
        f"  ending {case.ending} at {case.place:.3f}, prediction {case.prediction}, staggered {case.is_staggered}",
    ]
    return "\n".join(lines + [f"  - {problem}" for problem in played.problems])
