"""A replay accepts exactly what a running system accepts, where timing plays no part."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab.replay.evaluate import Policies, Replay, outcome_of
from lab.replay.folder import open_recording
from lab.replay.making import Machine, TextPlan, make_texts
from lab.replay.recorded_texts import TargetText
from lab.replay.recorder import Asking, record_drafter
from lab.replay.replay_prompts import Prompt
from moot.client import Client
from moot.core.errors import ConfigError
from moot.core.generation import Generation
from moot.drafters.interface import parse_entries
from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import complete
from tests.integration.looping_model import make_alike
from tests.integration.whole_system import FIXED, System, running

MAX_TOKENS = 48
QUESTIONS = ("abcabcabc", "count: 1 2 1 2 1 2", "x = x + 1; x = x + 1;", "la la la", "one two three one two", "????")
PROMPTS = [Prompt(f"{number}7", "qa", text) for number, text in enumerate(QUESTIONS)]
POLICIES = (
    Policies(vote="calibrated", shape="tree", weights="hedge", num_speculative_tokens=6, max_draft_tokens=9, width=2),
    Policies(vote="majority", shape="chain", weights="minions", num_speculative_tokens=4),
)
INSIDE = ("--in-process-drafters", "suffix,recycling")
QUIET = Machine(device="cpu", num_threads=1, num_rows=4)


@dataclass(frozen=True, slots=True)
class Live:
    """A tiny target; a draft model alike as a process, and in the router a drafter that copies and one that lives from
    the target's candidates."""

    system: System
    model: Path
    draft: Path


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("replayed")
    model = make_tiny_model(folder / "tiny")
    draft = make_alike(model, folder / "draft")
    with running(
        folder / "logs",
        model,
        drafters=("neural",),
        drafter_flags=("--model", str(draft), "--num-threads", "1", "--option", "dtype=float32"),
        router_flags=(*INSIDE, *FIXED),
    ) as system:
        yield Live(system, model, draft)


def quiet(text: str) -> None:
    """Progress of nobody's interest."""


def recorded(
    live: Live, folder: Path, prompts: Sequence[Prompt], temperature: float = 0.0, served_by: Client | None = None
) -> list[TargetText]:
    plan = TextPlan(model=str(live.model), max_tokens=MAX_TOKENS, temperature=temperature, seed=3, dtype="float32")
    meta, texts = make_texts(folder, plan, QUIET, prompts, quiet, served_by)
    entries = ("recycling", f"neural:model={live.draft}:num_threads=1:dtype=float32", "suffix")
    for entry in parse_entries(entries, "--drafters"):
        record_drafter(folder, entry, texts, meta.vocab_size, Asking(8, 2), quiet)
    return texts


def seen(metrics: dict[str, Any]) -> tuple[object, ...]:
    """Of one answer: rounds, drafted tokens, accepted per depth, and per drafter proposed, right, votes won."""
    drafters = {id_: tuple(counts.values()) for id_, counts in metrics["drafters"].items()}
    return metrics["num_drafts"], metrics["num_draft_tokens"], metrics["num_accepted_tokens_per_pos"], drafters


def decided(generation: Generation) -> tuple[object, ...]:
    """The same of a replayed text."""
    drafters = {
        id_: (count.num_proposed_tokens, count.num_accepted_tokens, count.num_votes_won)
        for id_, count in generation.drafters.items()
    }
    positions = generation.num_accepted_tokens_per_position
    return generation.num_rounds, generation.num_draft_tokens, positions, drafters


@pytest.mark.parametrize(
    ("policies", "temperature"),
    [*zip(POLICIES, (0.0, 0.8), strict=True)],
    ids=("calibrated", "sampled"),
)
def test_a_replay_is_what_a_running_system_does(
    live: Live, tmp_path: Path, policies: Policies, temperature: float
) -> None:
    """Every request, one after the other through a router that has just started: the same text, the same number of
    rounds and drafted tokens, the same acceptance at every depth, the same votes won by the same drafters."""
    texts = recorded(live, tmp_path / "recording", PROMPTS, temperature)
    played = Replay(open_recording(tmp_path / "recording")).run(policies)
    flags = ("--vote", policies.vote, "--shape", policies.shape, "--weights", policies.weights)
    limits = {
        "--num-speculative-tokens": policies.num_speculative_tokens,
        "--max-draft-tokens": policies.max_draft_tokens,
        "--proposal-width": policies.width,
    }
    bounds = [part for flag, number in limits.items() for part in (flag, str(number))]
    router = live.system.add_router((*flags, *bounds, *INSIDE, *FIXED))
    for number, (text, one) in enumerate(zip(texts, played, strict=True)):
        body = {"messages": [{"role": "user", "content": QUESTIONS[number]}], "seed": 3 + number}
        found = complete(router.port, body | {"max_tokens": MAX_TOKENS, "temperature": temperature}, chat=True)
        assert tuple(found.token_ids) == text.output_token_ids
        assert seen(found.drafting) == decided(one.generation), f"question {number}"
    # Worth something: much was drafted, accepted and rejected, and by whom differed.
    whole = outcome_of(played)
    assert whole.num_accepted > 15
    assert whole.num_drafted > whole.num_accepted + 40
    assert len(set(whole.votes_won.values())) > 1


def test_texts_of_a_server_are_looked_at(live: Live, tmp_path: Path) -> None:
    """Taken from a server a recording is the same as made here, candidates included; another target is noticed."""
    client = Client(live.system.url)
    own, served = (
        recorded(live, tmp_path / name, PROMPTS[:2], served_by=by) for name, by in (("own", None), ("served", client))
    )
    assert served == own
    for id_ in ("recycling", "suffix", "neural"):
        here, there = (open_recording(tmp_path / name).records[id_] for name in ("own", "served"))
        assert [here.of_text(index) for index in range(len(own))] == [there.of_text(index) for index in range(len(own))]
    other = TextPlan(model=str(live.draft), max_tokens=MAX_TOKENS, dtype="float32")
    with pytest.raises(ConfigError, match="is not that of"):
        make_texts(tmp_path / "other", other, QUIET, PROMPTS[:2], quiet, client)


def test_a_recording_of_something_else_is_not_gone_on_with(live: Live, tmp_path: Path) -> None:
    """Another temperature, other prompts: another folder; finished texts are read, not made again."""
    texts = recorded(live, tmp_path / "one", PROMPTS[:1])
    meta = json.loads((tmp_path / "one" / "meta.json").read_text())
    assert meta["settings"]["prompts"] == [PROMPTS[0].name]
    assert recorded(live, tmp_path / "one", PROMPTS[:1]) == texts
    with pytest.raises(ConfigError, match="other temperature"):
        recorded(live, tmp_path / "one", PROMPTS[:1], temperature=0.5)
