"""`moot replay`: acceptance without noise. `record` asks target and drafters once, `run` tries policies on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lab.replay.evaluate import Policies, Replay, by_group, outcome_of
from lab.replay.folder import open_recording
from lab.replay.recorder import NUM_ROWS, Asking, record_drafter
from lab.replay.replay_prompts import read_prompts
from lab.replay.replayed_rounds import Clock
from moot.client import AnswerOptions, Client
from moot.commands.common import DEFAULT_SEED, DEMO_MODEL, say, table
from moot.commands.system import prepared_model
from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of, part
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.drafter_selection import ALWAYS_ASK
from moot.core.speculation.policy import SpeculationOptions
from moot.drafters.interface import parse_entries
from moot.model.compute import ComputeOptions
from moot.simulation.machine_costs import StepCost

ACTIONS = ("record", "run")
USAGE = f"""usage: moot replay {{{",".join(ACTIONS)}}} [FLAGS]

  record  what the target says to prompts, and what each drafter proposes at every place of it
  run     evaluates policies on a recording: exactly, without noise, without the target

example:
  moot replay record --prompts questions.jsonl --held-out 7 --drafters suffix,prompt_lookup --out recording
  moot replay run recording --vote calibrated --shape tree --max-draft-tokens 7 -k 8"""
SHORT = {"-k": "--num-speculative-tokens", "--policy": "--vote"}


MOST = 255
"""Tokens and proposals of one answer in a recording."""


@dataclass(frozen=True, kw_only=True)
class RecordConfig(Options):
    target: str = option(DEMO_MODEL, help="the model that writes the texts: a folder, a hub id, or the demo's model")
    prompts: Path = option(help="JSON lines with `turns` (the first is asked) or `prompt`, for instance Spec-Bench's")
    held_out: tuple[str, ...] = option((), help="only prompts whose id ends in one of these digits (none: all)")
    limit: int | None = option(None, help="prompts recorded at most, evenly over the categories", minimum=1)
    out: Path = option(help="folder of the recording; an unfinished one is continued")
    drafters: tuple[str, ...] = option(
        ("suffix", "prompt_lookup", "recycling", "ngram"),
        help="drafters that are asked: [id=]kind[:option=value]... each; further ones may be added later",
    )
    num_speculative_tokens: int = option_of(
        SpeculationOptions, "num_speculative_tokens", help="tokens asked of every drafter", minimum=1, maximum=MOST
    )
    width: int = option_of(CollectionPolicy, "width", help="proposals asked of every drafter", minimum=1, maximum=MOST)
    max_tokens: int = option_of(AnswerOptions, "max_tokens")
    temperature: float = option(0.0, help="0: greedy", minimum=0)
    seed: int = option(DEFAULT_SEED, help="seed of the first prompt; the next ones count on from it")
    num_top_candidates: int = option_of(
        CollectionPolicy, "num_top_candidates", help="likeliest ids kept per place, for drafters that use them"
    )
    url: str | None = option(None, help="take the texts from this running server, which must serve the same target")
    api_key: str | None = option(None, help="sent to it as a bearer token")
    batch_invariant: str = option(
        "on", help="texts that do not depend on batch-mates, bit by bit", choices=("on", "off")
    )
    compute: ComputeOptions = part(ComputeOptions)
    num_rows: int = option(NUM_ROWS, help="texts made at a time", minimum=1)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Options):
    chosen: Policies = part(Policies)
    verify_ms: float = option(36.8, help="milliseconds of a verify step, for policies that look at time", above=0)
    verify_row_ms: float = option(0.4, help="milliseconds of each draft token in it", minimum=0)
    overhead_ms: float = option(1.0, help="milliseconds of a round beside drafting and verifying", minimum=0)
    alone: bool = option(True, help="also show each drafter alone, and the bounds")

    def policies(self) -> Policies:
        step = StepCost.line(self.verify_ms / 1000, self.verify_row_ms / 1000)
        return replace(self.chosen, clock=Clock(step=step, overhead_s=self.overhead_ms / 1000))


def run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    action, *rest = argv
    if action not in ACTIONS:
        raise ConfigError(f"moot replay {action}: known are {', '.join(ACTIONS)}")
    return _record(rest) if action == "record" else _run(rest)


def _record(argv: Sequence[str]) -> int:
    config = load_config(
        RecordConfig,
        argv,
        prog="moot replay record",
        description="Record what the target says to prompts, then what every drafter proposes at every place of it. "
        "Interrupted, it goes on where it was.",
        example="moot replay record --prompts questions.jsonl --held-out 7 --drafters suffix,recycling --out recording",
    )
    entries = parse_entries(config.drafters, "--drafters")
    prompts = read_prompts(config.prompts, config.held_out, config.limit)
    model = str(prepared_model(config.target, say))
    # Imports torch: not before the flags are known to be right.
    from lab.replay.making import Machine, TextPlan, make_texts, target_runner

    plan = TextPlan(
        model=model,
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        num_candidates=config.num_top_candidates,
        dtype=config.compute.dtype,
        batch_invariant=config.batch_invariant == "on",
    )
    compute = config.compute
    machine = Machine(device=compute.device, num_threads=compute.num_threads or None, num_rows=config.num_rows)
    served_by = Client(config.url, config.api_key) if config.url else None
    meta, texts = make_texts(config.out, plan, machine, prompts, say, served_by)
    asking = Asking(config.num_speculative_tokens, config.width)
    # For drafters that are attached to the verifier: loaded when the first one needs it, once for all.
    target = cache(lambda: target_runner(plan, machine))
    for entry in entries:
        record_drafter(config.out, entry, texts, meta.vocab_size, asking, say, target)
    tokens = sum(len(text.output_token_ids) for text in texts)
    print(f"{len(texts)} texts, {tokens} tokens, {len(entries)} drafters: {config.out}")
    return 0


def _run(argv: Sequence[str]) -> int:
    arguments = [SHORT.get(argument, argument) for argument in argv]
    folder = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    config = load_config(
        ReplayConfig,
        arguments,
        prog="moot replay run DIR",
        description="Evaluate policies on a recording. Every decision is made by the functions that the router calls.",
        example="moot replay run recording --vote majority --weights minions --shape chain -k 8",
    )
    if folder is None:
        raise ConfigError("moot replay run needs the folder of a recording: moot replay run DIR [FLAGS]")
    print(report(Replay(open_recording(Path(folder), config.chosen.drafter_ids)), config))
    return 0


def report(replay: Replay, config: ReplayConfig) -> str:
    policies = config.policies()
    played = replay.run(policies)
    whole = outcome_of(played)
    rows = [
        [group, str(found.num_rounds), f"{found.mean_acceptance_length:.3f}", f"{found.drafted_per_round:.2f}"]
        for group, found in [*by_group(played).items(), ("all", whole)]
    ]
    depths = [
        [str(depth), str(count), f"{count / max(whole.num_rounds, 1):.3f}"]
        for depth, count in enumerate(whole.accepted_per_position, 1)
    ]
    drafters = [
        [id_, *(str(counts.get(id_, 0)) for counts in (whole.proposed, whole.would_accept, whole.votes_won))]
        for id_ in policies.drafter_ids or replay.drafter_ids
    ]
    if config.alone:
        singles = {id_: outcome_of(found) for id_, found in replay.alone(policies).items()}
        for row in drafters:
            row.append(f"{singles[row[0]].mean_acceptance_length:.3f}")
    parts = [
        table(["category", "rounds", "acceptance length", "drafted per round"], rows),
        table(["draft token", "accepted", "of the rounds"], depths),
        table(["drafter", "proposed", "right", "votes won", *(["alone"] if config.alone else [])], drafters),
    ]
    if config.alone:
        bounds = [
            f"{name} {bound_length(replay, policies, coherent):.3f}"
            for name, coherent in (("all proposals verified", True), ("any drafter right at each depth", False))
        ]
        parts.append("bounds: " + ", ".join(bounds))
    if policies.cascade < ALWAYS_ASK:
        skipped = ", ".join(f"{id_} in {count} rounds" for id_, count in sorted(whole.skipped.items()))
        parts.append(f"not asked: {skipped or 'nobody'}")
    if policies.length != "fixed":
        parts.append(f"mean K {whole.mean_length:.2f}, by the clock {whole.tokens_per_s:.1f} tokens/s")
    return "\n\n".join(parts)


def bound_length(replay: Replay, policies: Policies, coherent: bool) -> float:
    """Mean acceptance length of a bound over all texts."""
    found = replay.bound(policies, coherent=coherent)
    rounds = sum(count for _, count, _ in found)
    return 1 + sum(accepted for _, _, accepted in found) / max(rounds, 1)
