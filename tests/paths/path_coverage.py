"""What the played cases were about, counted: equality proves something only where drafts of all sorts were accepted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moot.core.speculation.drafter_selection import SELECTIONS
from moot.core.speculation.length import LENGTHS
from moot.core.types import ROOT, Draft, FinishReason
from moot.core.voting.draft_trie import SHAPES
from moot.core.voting.voting import POLICIES
from moot.core.voting.weights import WEIGHTS
from services.verifier.engine import Engine
from tests.paths.path_drawing import ALL_DRAFTERS, HASTY, INSIDE, LOCAL, MODELS, OF_REQUESTS, STAGES, TARGETS
from tests.paths.path_peers import House
from tests.paths.path_play import Played, describe, play_all

HONEST = (*LOCAL, *MODELS, *OF_REQUESTS, *INSIDE, "knowing")
"""Drafters of which some proposals must have been right."""


@dataclass
class Findings:
    """Cases that were played, and all that was seen of them."""

    played: list[Played] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)

    async def play(
        self,
        house: House,
        numbers: Sequence[int],
        on_played: Callable[[Played], None] = lambda played: None,
        *,
        is_alone: bool = False,
    ) -> Findings:
        def note(played: Played) -> None:
            self.played.append(played)
            count(played, self.seen)
            on_played(played)

        await house.change_targets(lambda engine: watch(engine, self.seen))
        await play_all(house, numbers, note, is_alone=is_alone)
        return self

    @property
    def wrong(self) -> str:
        return "\n".join(describe(played) for played in self.played if played.problems)


def watch(engine: Engine, seen: Counter[str]) -> None:
    """Count what the verifier's walks come by; they stay what they are."""
    walks = engine.serving.steps.walks
    walk = walks.walk

    def watched(session, work, logits):  # type: ignore[no-untyped-def]
        walked, rows = walk(session, work, logits)
        draft = work.draft
        if draft.token_ids:
            seen[f"walk: {walked.num_accepted} accepted"] += 1
            seen["walk: of a tree"] += not draft.is_chain
            seen["walk: through a later sibling"] += _through_later_sibling(draft, walked.accepted_nodes)
            ends_inside = walked.num_accepted == len(walked.output_token_ids)
            seen["walk: an end inside a draft"] += ends_inside and walked.finish is FinishReason.STOP
        return walked, rows

    walks.walk = watched  # type: ignore[method-assign]


def _through_later_sibling(draft: Draft, accepted: Iterable[int]) -> bool:
    parent = ROOT
    for node in accepted:
        if parent in draft.parents[:node]:
            return True
        parent = node
    return False


def count(played: Played, seen: Counter[str]) -> None:
    """One case more."""
    seen["cases"] += 1
    case, system, body = played.case, played.case.system, played.case.body
    told = [outcome.last.metrics for outcome in played.outcomes if outcome.last is not None and outcome.last.metrics]
    seen["choices"] += len(told)
    seen["tokens"] += sum(one.num_output_tokens for one in told)
    seen["rounds"] += sum(one.num_rounds for one in told)
    seen["drafted tokens"] += sum(one.num_draft_tokens for one in told)
    seen["accepted tokens"] += sum(one.num_accepted_tokens for one in told)
    drafted = any(one.num_draft_tokens for one in told)
    accepted = any(one.num_accepted_tokens for one in told)
    seen["cases without a draft"] += not drafted
    seen["cases with accepted tokens"] += accepted
    for name in played.heard:
        seen[f"heard: {name}"] += 1
        seen[f"stages: {STAGES.get(name, 0)}"] += 1
    for name in {name for one in told for name, count in one.drafters.items() if count.num_accepted_tokens}:
        seen[f"right: {name}"] += 1
    if not accepted:
        return
    for name in ("vote", "shape", "weights", "length", "asks"):
        seen[f"{name}: {system.settings[name]}"] += 1
    for name in ("num_speculative_tokens", "max_draft_tokens", "proposal_width"):
        seen[f"{name}: {system.settings[name]}"] += 1
    seen["cascade"] += system.settings["cascade"] < 1
    seen["hasty vote"] += system.settings["vote_hard_deadline_ms"] == HASTY[1]
    seen["drafters sent away"] += system.settings["ejection_failures"] < 10
    seen[f"target: {system.target.name}"] += 1
    seen[f"drafters: {min(len(case.drafters), 5)}"] += 1
    seen[f"K: {body.get('num_speculative_tokens', 'policy')}"] += 1
    seen[f"n: {body['n']}"] += 1
    seen[f"temperature: {body['temperature']}"] += 1
    for name in _OF_BODIES:
        seen[f"body: {name}"] += name in body
    seen[f"ending: {case.ending}"] += 1
    seen["stop string"] += any(isinstance(outcome.expected.stop_reason, str) for outcome in played.outcomes)
    seen["stop token"] += any(isinstance(outcome.expected.stop_reason, int) for outcome in played.outcomes)
    seen["prefix shared"] += any(one.num_cached_tokens for one in told)


_OF_BODIES = (
    *("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("allowed_token_ids", "min_tokens", "logprobs", "messages", "ignore_eos", "include_stop_str_in_output"),
)


def missing(seen: Counter[str]) -> list[str]:
    """What occurred too seldom for so many cases."""
    cases = seen["cases"]

    def per_500(wanted: int) -> int:
        return max(1, wanted * cases // 500)

    wanted = {f"heard: {name}": per_500(8) for name in ALL_DRAFTERS}
    wanted |= {f"right: {name}": per_500(3) for name in HONEST}
    wanted |= {f"stages: {depth}": per_500(10) for depth in (1, 2, 3)}
    for setting, names in (
        ("vote", POLICIES),
        ("shape", SHAPES),
        ("weights", WEIGHTS),
        ("length", LENGTHS),
        ("asks", SELECTIONS),
    ):
        wanted |= {f"{setting}: {name}": per_500(30) for name in names}
    wanted |= {f"target: {spec.name}": per_500(15) for spec in TARGETS}
    wanted |= {f"drafters: {count}": per_500(15) for count in range(1, 6)}
    wanted |= {f"K: {length}": per_500(5) for length in range(1, 9)}
    wanted |= {f"n: {choices}": per_500(20) for choices in (1, 2, 3)}
    wanted |= {f"temperature: {one}": per_500(20) for one in (0.0, 0.3, 0.7, 1.0)}
    wanted |= {f"body: {name}": per_500(15) for name in _OF_BODIES}
    wanted |= {f"walk: {length} accepted": per_500(10) for length in range(6)}
    wanted |= {"walk: of a tree": per_500(100), "walk: through a later sibling": per_500(15)}
    wanted |= {"walk: an end inside a draft": per_500(5)}
    wanted |= {"cascade": per_500(30), "hasty vote": per_500(5), "drafters sent away": per_500(30)}
    wanted |= {"stop string": per_500(15), "stop token": per_500(15), "prefix shared": per_500(15)}
    wanted |= {"accepted tokens": per_500(800), "cases with accepted tokens": per_500(200)}
    return [f"{name}: {seen[name]} of {least}" for name, least in wanted.items() if seen[name] < least]
