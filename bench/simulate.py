"""Plans on paper that run: what installations deliver that no machine here has, and how far the simulation is right.

    python -m bench.simulate [--reports all] [--max-verifiers 1000]
    python -m bench.simulate --validate [--prompts FILE]

The simulation (moot/simulation) runs the project's own policies, vote and scheduler in simulated time. `--validate`
starts the whole system on this machine, measures the tables (step times of the verifier driven directly, CPU per round
of every process while it answers the first half of the prompts), predicts tokens/s of the second half at each
concurrency and compares. Nothing is fitted to what is predicted. The reports take costs like those of a GPU: a step
takes 30 ms and 0.2 ms for each row from the 64th on, a drafted token 3 ms, one way between two pods 1 ms.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.end_to_end import read_prompts
from bench.report import publish
from bench.simulated.calibrate import Run, StepTable, as_json, record, run_load, step_table
from bench.simulated.recorded import RecordedTexts, Recording
from bench.simulated.reports import REPORTS, ReportConfig
from moot.commands.common import say
from moot.commands.demo_prompts import PROMPTS
from moot.commands.system import SystemConfig, prepared_model, running
from moot.config import load_config, option
from moot.core.errors import ConfigError
from moot.core.policy import PoolPolicy
from moot.simulation.costs import DraftTime, StepCost
from moot.simulation.drafters import PoolPlan
from moot.simulation.requests import RouterPlan
from moot.simulation.verifiers import VerifierPlan
from moot.simulation.world import Outcome, Scenario, World
from moot.tokenizer import load_tokenizer, vocabulary_size

CONCURRENCIES = (1, 4, 16)
BOUND = 0.15


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(SystemConfig, ReportConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    validate: bool = option(False, help="compare with the real system on this machine")
    reports: tuple[str, ...] = option(("all",), help=f"which: {', '.join(REPORTS)}, all")
    prompts: Path | None = option(None, help="JSON lines with `turns` or `prompt`; none: the demo's five, varied")
    max_tokens: int = option(64, help="longest answer when validating, in tokens")
    num_prompts: int = option(16, help="prompts in each half when validating")
    repetitions: int = option(5, help="steps timed per size when validating")


def halves(config: SimulateConfig) -> tuple[list[str], list[str]]:
    """Prompts to measure costs on, and prompts to predict."""
    if config.prompts is not None:
        found = list(read_prompts(config.prompts, 2 * config.num_prompts).values())
    else:
        endings = ("", " Answer briefly.", " Explain every step.", " Write as for a child.", " Give an example.")
        found = [text + ending for ending in endings for text in PROMPTS.values()]
        found += [f"{text} Begin with a title." for text in found]
    found = found[: 2 * config.num_prompts]
    return found[::2], found[1::2]


def some(prompts: list[Any], concurrency: int) -> list[Any]:
    """One request alone takes long: fewer of them."""
    return prompts if concurrency > 1 else prompts[: max(len(prompts) // 2, 1)]


class Predictor:
    """The same requests in the same order in simulated time; what the router's policy learns goes on from run to run,
    as it does in the real one."""

    def __init__(self, table: StepTable, kinds: list[str], vocab_size: int) -> None:
        self._table = table
        self._kinds = kinds
        self._texts = RecordedTexts([], kinds, vocab_size)
        self._policies: Sequence[PoolPolicy] = ()

    def stretch(self, costs: Run, concurrency: int, recordings: list[Recording]) -> float:
        """How much longer steps took in the first half than the table and the model of shared cores say: what the
        processes lose by sharing caches and by waking each other up. Measured on steps, not on tokens per second."""
        kept = self._policies
        self._policies = copy.deepcopy(kept)
        found = self.run(costs, concurrency, recordings, 1.0)
        self._policies = kept
        simulated = found.verifier_utilisation * found.elapsed_s / max(found.num_steps, 1)
        return costs.forward_s / max(costs.steps, 1) / simulated

    def run(self, costs: Run, concurrency: int, recordings: list[Recording], stretch: float) -> Outcome:
        per_round = {name: seconds / costs.rounds for name, seconds in costs.cpu_s.items()}
        cost = StepCost(self._table.seconds, self._table.prefill_token_s).stretched(stretch)
        scenario = Scenario(
            verifier=VerifierPlan(cost, threads=2, max_num_seqs=32),
            pools=tuple(
                PoolPlan(kind, time=DraftTime(0.0, 0.0), overhead_s=per_round[f"drafter-{kind}"])
                for kind in self._kinds
            ),
            router=RouterPlan(
                open_s=per_round["router"],
                round_s=per_round["router"],
                network_s=self._table.hop_s,
                beside_s=(per_round.get("store", 0.0), per_round["client"]),
            ),
            num_cores=2,
            concurrency=concurrency,
            num_requests=len(recordings),
            warm_up_s=0.0,
            measure_s=1e4,
        )
        self._texts.replace(recordings)
        world = World(scenario, self._texts, self._policies)
        found = world.run()
        self._policies = world.policies
        return found


def validate(config: SimulateConfig) -> int:
    first, second = halves(config)
    with running(config, "simulate", say) as system:
        model = system.client.models()[0]
        tokenizer = load_tokenizer(str(prepared_model(config.model, say)))

        def ids(prompt: str) -> list[int]:
            chat = [{"role": "user", "content": prompt}]
            return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

        say("recording the target's answers")
        recorded = [
            asyncio.run(record(system.verifier.port, [ids(prompt) for prompt in half], config.max_tokens))
            for half in (first, second)
        ]
        say("step times of the verifier, driven directly")
        table = asyncio.run(
            step_table(
                system.verifier.port,
                [ids(prompt) for prompt in first],
                (1, 2, 4, 8, 16),
                (1, 3, 6, 9, 13),
                config.repetitions,
            )
        )
        costs: dict[int, Run] = {}
        real: dict[int, Run] = {}
        for concurrency in CONCURRENCIES:
            say(f"concurrency {concurrency}: first half, for the costs")
            costs[concurrency] = run_load(system, model, some(first, concurrency), concurrency, config.max_tokens)
            say(f"concurrency {concurrency}: second half, to compare with")
            real[concurrency] = run_load(system, model, some(second, concurrency), concurrency, config.max_tokens)
    kinds = [entry.partition(":")[0] for entry in config.drafters]
    predictor = Predictor(table, kinds, vocabulary_size(tokenizer))
    rows, facts = [], []
    for concurrency in CONCURRENCIES:
        measured, was = costs[concurrency], real[concurrency]
        halves_recorded = [some(one, concurrency) for one in recorded]
        stretch = predictor.stretch(measured, concurrency, halves_recorded[0])
        predictor.run(measured, concurrency, halves_recorded[0], stretch)
        found = predictor.run(measured, concurrency, halves_recorded[1], stretch)
        deviation = found.tokens_per_s / was.tokens_per_s - 1
        verdict = "reached" if abs(deviation) <= BOUND else "missed"
        rows.append(
            (
                concurrency,
                f"{was.tokens_per_s:.1f}",
                f"{found.tokens_per_s:.1f}",
                f"{deviation:+.0%}",
                verdict,
                f"{stretch:.2f}",
                f"{was.tokens / max(was.rounds, 1):.2f}",
                f"{found.tokens_per_round:.2f}",
                f"{1e3 * was.forward_s / max(was.steps, 1):.1f}",
                f"{1e3 * found.verifier_utilisation * found.elapsed_s / max(found.num_steps, 1):.1f}",
            )
        )
        facts.append(
            {"real": asdict(was), "costs": asdict(costs[concurrency]), "predicted": asdict(found), "stretch": stretch}
        )
    header = (
        *("concurrency", "real tokens/s", "predicted", "deviation", "within 15 %"),
        *("steps stretched by", "real tokens/round", "predicted", "real step ms", "predicted"),
    )
    publish("simulate_validate", header, rows, {"runs": facts, "table": as_json(table)}, script="simulate")
    return 0 if all(row[4] == "reached" for row in rows) else 1


def main() -> int:
    config = load_config(SimulateConfig, sys.argv[1:], prog="python -m bench.simulate", description=__doc__ or "")
    if config.validate:
        return validate(config)
    names = list(REPORTS) if "all" in config.reports else list(config.reports)
    if unknown := sorted(set(names) - set(REPORTS)):
        raise ConfigError(f"no report {', '.join(unknown)} (known: {', '.join(REPORTS)}, all)")
    for name in names:
        say(f"report {name}")
        REPORTS[name](config)
    return 0


if __name__ == "__main__":
    sys.exit(main())
