"""Plans on paper that run: what installations deliver that no machine here has, and how far the simulation is right.

    python -m lab.bench.simulate [--reports all] [--max-verifiers 1000]
    python -m lab.bench.simulate --validate [--prompts FILE] [--add]

The simulation (moot/simulation) runs the project's own policies, vote and scheduler in simulated time. `--validate`
starts the whole system on this machine and times the verifier's steps by driving it directly; then, at each
concurrency, the first half of the prompts and the second half are answered in turns. Of the first halves come the costs
(CPU per round of every process, and how much longer steps take than alone), of the second halves tokens/s, to be
compared with what the simulation says. A pair is a first half and the second half right after it: what makes this
machine slow for a minute is in both. Nothing is fitted to what is predicted. `--add`: to the pairs of earlier runs.
The reports take costs like those of a GPU: a step takes 30 ms and 0.2 ms for each row from the 64th on, a drafted token
3 ms, one way between two pods 1 ms.
"""

from __future__ import annotations

import asyncio
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.bench.harness.intervals import ratios
from lab.bench.harness.pages import Bench, Table
from lab.bench.harness.prompts import PromptConfig, read_prompts
from lab.bench.simulate.calibrate import ProcessCosts, Run, StepTable, process_costs, record, run_load, step_table
from lab.bench.simulate.recorded import RecordedTexts, Recording
from lab.bench.simulate.reports import REPORTS, ReportConfig
from moot.commands.common import say
from moot.commands.demo import PROMPTS
from moot.commands.system import ANY_DRAFTER_SET, SystemConfig, drafters_of, prepared_model, running
from moot.config import option
from moot.core.errors import ConfigError
from moot.core.speculation.policy import PoolPolicy
from moot.simulation.machine_costs import DraftTime, StepCost
from moot.simulation.router_plan import RouterPlan
from moot.simulation.simulated_drafters import PoolPlan
from moot.simulation.simulated_verifiers import VerifierPlan
from moot.simulation.world import Scenario, SimulatedOutcome, World
from moot.tokenizer import load_tokenizer, vocabulary_size

BENCH = Bench("simulate", __doc__, measures=("moot/simulation", "moot/core"))
CONCURRENCIES = (1, 4, 16)
BOUND = 0.15


@dataclass(frozen=True, kw_only=True)
class Config(PromptConfig, SystemConfig, ReportConfig):
    port: int = option(0, help="port of the router's HTTP API; 0 chooses a free one")
    drafters: tuple[str, ...] = option(ANY_DRAFTER_SET, help="[id=]kind[:option=value]... each")
    drafter_processes: bool = option(True, help="every drafter as a process of its own, as its pods are on a cluster")
    validate: bool = option(False, help="compare with the real system on this machine")
    add: bool = option(False, help="keep the pairs of earlier runs, and add to them")
    reports: tuple[str, ...] = option(("all",), help=f"which: {', '.join(REPORTS)}, all")
    max_tokens: int = option(64, help="longest answer when validating, in tokens")
    num_prompts: int = option(16, help="prompts in each half when validating")
    pairs: int = option(4, help="pairs at each concurrency when validating")
    repetitions: int = option(5, help="steps timed per size when validating")


def halves(config: Config) -> tuple[list[str], list[str]]:
    """Prompts to measure costs on, and prompts to predict; without a file the demo's five, varied."""
    if config.prompts is not None:
        found = list(read_prompts(config, 2 * config.num_prompts).values())
    else:
        endings = ("", " Answer briefly.", " Explain every step.", " Write as for a child.", " Give an example.")
        found = [text + ending for ending in endings for text in PROMPTS.values()]
        found += [f"{text} Begin with a title." for text in found]
    # In order of length, so that the halves are alike.
    found = sorted(found[: 2 * config.num_prompts], key=len)
    return found[::2], found[1::2]


def some(prompts: list[Any], concurrency: int, pair: int) -> list[Any]:
    """Those of pair number `pair`: all in its own order, or, where few requests at a time would take long, fewer."""
    count = min(len(prompts), max(4, 2 * concurrency))
    begin = pair * count % len(prompts)
    return (prompts[begin:] + prompts[:begin])[:count]


def step_s(found: SimulatedOutcome) -> float:
    """Seconds of a step, mean."""
    return found.verifier_utilisation * found.elapsed_s / max(found.num_steps, 1)


class Predictor:
    """The same requests in the same order in simulated time; what the router's policy learns goes on from run to run,
    as it does in the real one."""

    def __init__(self, table: StepTable, kinds: list[str], vocab_size: int) -> None:
        self._cost = StepCost(table.seconds, table.prefill_token_s, table.context_token_s)
        self._hop_s = table.hop_s
        self._kinds = kinds
        self._texts = RecordedTexts([], kinds, vocab_size)
        self._policies: Sequence[PoolPolicy] = ()

    def stretch(self, costs: ProcessCosts, once: Run, concurrency: int, recordings: list[Recording]) -> float:
        """How much longer the steps of `once` took than the table and the model of shared cores say: what processes
        lose by sharing caches and by waking each other up. Measured on steps, not on tokens per second."""
        kept = self._policies, self._texts
        # What is learned while trying is not learned twice.
        self._policies, self._texts = copy.deepcopy(kept)
        tried = self.run(costs, concurrency, recordings, 1.0)
        self._policies, self._texts = kept
        # Where more was drafted than here, that is not what made steps longer.
        larger = self._mean_step_s(once.step_tokens / once.steps, once.step_requests / once.steps)
        larger /= self._mean_step_s(tried.rows_per_step, tried.requests_per_step)
        return once.step_s / (step_s(tried) * larger)

    def _mean_step_s(self, rows: float, requests: float) -> float:
        """Of the table, for means."""
        low, high = (self._cost.seconds(round(rows), count) for count in (int(requests), int(requests) + 1))
        return low + (requests - int(requests)) * (high - low)

    def run(
        self, costs: ProcessCosts, concurrency: int, recordings: list[Recording], stretch: float
    ) -> SimulatedOutcome:
        per_round = costs.round_s
        scenario = Scenario(
            verifier=VerifierPlan(self._cost.stretched(stretch), batching="gathered", threads=2, max_num_seqs=32),
            pools=tuple(
                PoolPlan(kind, time=DraftTime(0.0, 0.0), overhead_s=costs.drafter_ask_s[f"drafter-{kind}"])
                for kind in self._kinds
            ),
            router=RouterPlan(
                open_s=per_round["router"],
                round_s=(1 - costs.behind) * per_round["router"],
                behind_s=costs.behind * per_round["router"],
                ask_s=costs.ask_s,
                network_s=self._hop_s,
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


@dataclass(frozen=True, slots=True)
class Pair:
    """One second half, as it was and as it was predicted."""

    concurrency: int
    costs: Run
    real: Run
    predicted: SimulatedOutcome
    stretch: float


def measure(config: Config) -> tuple[Predictor, dict[int, list[tuple[Run, Run]]], list[list[Recording]]]:
    """Everything that the real system says: what costs are made of, both halves at each concurrency, the answers."""
    first, second = halves(config)
    with running(config, "simulate", say) as system:
        model = system.client.models()[0]
        tokenizer = load_tokenizer(str(prepared_model(config.model, say)))

        def ids(prompt: str) -> list[int]:
            chat = [{"role": "user", "content": prompt}]
            return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))

        say("recording the target's answers")
        prompts = [[ids(prompt) for prompt in half] for half in (first, second)]
        recorded = asyncio.run(record(system.verifier.port, prompts[0] + prompts[1], config.max_tokens))
        say("step times of the verifier, driven directly")
        sizes, num_ids = ((1, 2, 4, 8, 16), (1, 3, 6, 9, 13)), min(vocabulary_size(tokenizer), 40_000)
        table = asyncio.run(step_table(system.verifier.port, prompts[0], *sizes, num_ids, config.repetitions))
        say(str(table))
        runs: dict[int, list[tuple[Run, Run]]] = {}
        for concurrency in CONCURRENCIES:
            runs[concurrency] = []
            for pair in range(config.pairs):
                one, other = (
                    run_load(system, model, some(half, concurrency, pair), concurrency, config.max_tokens)
                    for half in (first, second)
                )
                runs[concurrency].append((one, other))
                say(f"concurrency {concurrency}, pair {pair + 1}: {one.tokens_per_s:.1f}, {other.tokens_per_s:.1f}")
    kinds = [entry.kind for entry in drafters_of(config).processes]
    predictor = Predictor(table, kinds, vocabulary_size(tokenizer))
    return predictor, runs, [recorded[: len(first)], recorded[len(first) :]]


def predict(
    predictor: Predictor, runs: dict[int, list[tuple[Run, Run]]], recorded: list[list[Recording]]
) -> list[Pair]:
    """The same requests in the same order."""
    pairs = []
    found_costs = process_costs({concurrency: [one for one, _ in both] for concurrency, both in runs.items()})
    for concurrency, measured in runs.items():
        costs = found_costs[concurrency]
        say(f"concurrency {concurrency}: {costs}")
        for pair, (one, other) in enumerate(measured):
            first, second = (some(half, concurrency, pair) for half in recorded)
            stretch = predictor.stretch(costs, one, concurrency, first)
            predictor.run(costs, concurrency, first, stretch)
            found = predictor.run(costs, concurrency, second, stretch)
            pairs.append(Pair(concurrency, one, other, found, stretch))
            say(f"concurrency {concurrency}, pair {pair + 1}: {found.tokens_per_s / other.tokens_per_s - 1:+.1%}")
    return pairs


def pair_of(entry: dict[str, Any]) -> Pair:
    """As it was written down."""
    lengths = {int(key): value for key, value in entry["predicted"]["lengths"].items()}
    predicted = SimulatedOutcome(**entry["predicted"] | {"over_time": (), "lengths": lengths})
    return Pair(entry["concurrency"], Run(**entry["costs"]), Run(**entry["real"]), predicted, entry["stretch"])


Both = tuple[str, Callable[[Run], float], Callable[[SimulatedOutcome], float], int]
BOTH: tuple[Both, ...] = (
    ("tokens/round", lambda run: run.tokens / max(run.rounds, 1), lambda found: found.tokens_per_round, 2),
    ("mean K", lambda run: run.asked_tokens / max(run.rounds, 1), lambda found: found.mean_length, 1),
    ("step ms", lambda run: 1e3 * run.step_s, lambda found: 1e3 * step_s(found), 1),
    ("requests/step", lambda run: run.step_requests / max(run.steps, 1), lambda found: found.requests_per_step, 1),
)
"""Columns that stand real beside predicted."""
SPEED: Both = ("tokens/s, real / predicted", lambda run: run.tokens_per_s, lambda found: found.tokens_per_s, 1)
HEADER = ("concurrency", "pairs", SPEED[0], "predicted, of real (95 %)", "within 15 %")


def medians(pairs: Sequence[Pair], column: Both) -> str:
    _, real, predicted, digits = column
    both = (
        statistics.median(real(pair.real) for pair in pairs),
        statistics.median(predicted(pair.predicted) for pair in pairs),
    )
    return " / ".join(f"{value:.{digits}f}" for value in both)


def validate(config: Config, argv: Sequence[str] | None) -> int:
    kept = BENCH.kept(config, "validate").get("pairs", []) if config.add else []
    pairs = [pair_of(entry) for entry in kept] + predict(*measure(config))
    rows = []
    for concurrency in CONCURRENCIES:
        chosen = [pair for pair in pairs if pair.concurrency == concurrency]
        ratio = ratios([pair.predicted.tokens_per_s for pair in chosen], [pair.real.tokens_per_s for pair in chosen])
        within = ratio.verdict(at_least=1 - BOUND, at_most=1 + BOUND)
        stretch = statistics.median(pair.stretch for pair in chosen)
        cells = [medians(chosen, column) for column in BOTH]
        rows.append([concurrency, len(chosen), medians(chosen, SPEED), ratio.text(), within, *cells, f"{stretch:.2f}"])
    table = Table((*HEADER, *(column[0] for column in BOTH), "steps stretched by"), rows)
    BENCH.publish(config, table, {"pairs": [asdict(pair) for pair in pairs]}, HEADER[3], part="validate", argv=argv)
    return 0 if all("missed" not in row for row in rows) else 1


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    if config.validate:
        return validate(config, argv)
    names = list(REPORTS) if "all" in config.reports else list(config.reports)
    if unknown := sorted(set(names) - set(REPORTS)):
        raise ConfigError(f"no report {', '.join(unknown)} (known: {', '.join(REPORTS)}, all)")
    for name in names:
        say(f"report {name}")
        report = REPORTS[name](config)
        facts = {"seeds": config.sim_seeds, "simulated_s": config.simulated_s}
        BENCH.publish(config, report.table, facts, report.picture, part=name, argv=argv)
    return 0


if __name__ == "__main__":
    sys.exit(main())
