"""Moot and other systems side by side, interleaved prompt by prompt, in one run on this machine.

    python -m lab.bench.peers [--peers moot,transformers,...] [--prompts FILE --held-out] [--concurrency 1,16]

Every peer gets the same token ids and the same most tokens, greedy. One that is not to speak is stopped. Environments
are made once under --venvs. --seconds ends a call early; the next with the same --samples goes on where it ended and
the table is of all calls; ratios are only taken within a round, which one call measures, and a round that was cut off
is measured again. --report-only makes the table of such a file. Without --prompts: the demo's five.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.bench.harness.pages import COMMANDS, ROOT, Bench, Table
from lab.bench.harness.prompts import PromptConfig, read_prompts
from lab.bench.peers.catalogue import PEERS, Peer, chosen
from lab.bench.peers.environments import gguf_files, interpreter
from lab.bench.peers.figures import HEADER, Sample, complete, fingerprint, rows
from lab.bench.peers.protocol import Child, PeerFailed
from moot.commands.common import DEMO_MODEL, say
from moot.commands.demo import PROMPTS
from moot.commands.system import prepared_model
from moot.config import option
from moot.core.errors import ConfigError, MootError
from moot.shipped import cache_dir

BENCH = Bench("peers", __doc__, measures=("services", "moot/core", "moot/drafters", "moot/model"))
START_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class Config(PromptConfig):
    peers: tuple[str, ...] = option(tuple(peer.name for peer in PEERS), help="which")
    limit: int = option(8, help="prompts taken, evenly over the categories")
    concurrency: tuple[int, ...] = option((1, 16), help="requests at once")
    passes: int = option(2, help="times each prompt is asked alone")
    repetitions: int = option(7, help="rounds at each concurrency above 1")
    max_tokens: int = option(96, help="longest answer, in tokens")
    threads: int = option(os.cpu_count() or 1, help="compute threads of every peer")
    seconds: float = option(86_400.0, help="begin no round after so long")
    samples: Path | None = option(None, help="file that samples are added to, and read from")
    venvs: Path = option(cache_dir() / "peers", help="folder of the peers' environments and files")
    install_only: bool = option(False, help="make environments and files, measure nothing")
    report_only: bool = option(False, help="measure nothing: the table of --samples")

    @property
    def chosen(self) -> list[Peer]:
        """Raises ConfigError for a name there is none of."""
        return chosen(self.peers)


def tokenized(folder: Path, texts: Sequence[str]) -> tuple[list[list[int]], list[int]]:
    """Prompt token ids with the chat template applied, as the router applies it, and the ids that end an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]
    return prompts, ends if isinstance(ends, list) else [ends]


def start(peer: Peer, config: Config, model: Path) -> Child | None:
    """None where it was only to be installed. Raises PeerFailed or MootError."""
    python = interpreter(peer.environment, config.venvs)
    reads = gguf_files(config.venvs / "gguf") if peer.name == "llama_cpp" else model
    if config.install_only:
        return None
    child = f"{COMMANDS}.peers.children.{peer.script}"
    command = [str(python), "-m", child, str(reads), str(config.threads), *peer.arguments]
    environ = {
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM runs tools (ninja) that lie in its own environment; compiled code is kept beside it.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "VLLM_CACHE_ROOT": str(config.venvs / "vllm-cache"),
        "MOOT_CACHE": str(cache_dir()),
        "PYTHONPATH": str(ROOT),
    }
    log = config.venvs / "logs" / f"{peer.name}.log"
    process = Child(command, log, environ, START_TIMEOUT_S, may_be_paused=peer.may_be_paused)
    say(f"{peer.name} is ready {process.ready.get('versions', {})}")
    return process


@contextmanager
def started(peers: Sequence[Peer], config: Config, model: Path, failures: dict[str, str]) -> Iterator[dict[str, Child]]:
    """Those that start; the errors of the others go to `failures`."""
    children: dict[str, Child] = {}
    try:
        for peer in peers:
            say(f"starting {peer.name}")
            try:
                child = start(peer, config, model)
                if child is not None:
                    children[peer.name] = child
            except (PeerFailed, MootError) as error:
                failures[peer.name] = str(error)
                say(f"{peer.name} FAILED: {error}")
        yield children
    finally:
        for child in children.values():
            child.close()


def places(count: int, index: int, at_once: int) -> list[int]:
    """Which of `count` prompts round `index` asks."""
    return [(index + offset) % count for offset in range(at_once)]


class Turns:
    """Asks every variant of every peer in turns, round by round, and keeps what they answered."""

    def __init__(
        self,
        peers: Sequence[Peer],
        children: dict[str, Child],
        asked: dict[str, Any],
        failures: dict[str, str],
        run: str,
    ) -> None:
        self._peers = peers
        self._children = children
        self._asked = asked
        self._failures = failures
        self._run = run

    def warm_up(self, at_once: int, max_tokens: int) -> None:
        """Unmeasured, from the longest prompt on and at full length: first turns are many times slower."""
        prompts = self._asked["prompts"]
        self.round(max(range(len(prompts)), key=lambda place: len(prompts[place])), at_once, max_tokens)

    def round(self, index: int, at_once: int, max_tokens: int) -> list[Sample]:
        """One prompt, or `at_once` of them together; every other round in the reverse order."""
        picked = places(len(self._asked["prompts"]), index, at_once)
        asked = fingerprint([self._asked["prompts"][place] for place in picked], max_tokens)
        turns = [
            (peer, variant) for peer in self._peers for variant in peer.variants if variant.batches or at_once == 1
        ]
        samples = []
        for peer, variant in turns if index % 2 == 0 else reversed(turns):
            child = self._children.get(peer.name)
            key = f"{peer.name} {variant.name}"
            if child is None or key in self._failures:
                continue
            request = {
                "variant": variant.name,
                "prompts": [self._asked["prompts"][place] for place in picked],
                "texts": [self._asked["texts"][place] for place in picked],
                "max_tokens": max_tokens,
                "stop_token_ids": self._asked["stop_token_ids"],
            }
            try:
                answers = child.ask(request, TURN_TIMEOUT_S)
            except PeerFailed as error:
                self._failures[key] = str(error)
                say(f"{key} FAILED: {error}")
                continue
            samples.append(Sample.of(self._run, asked, variant.name, at_once, index, answers))
            say(f"  {at_once:>2} at once, round {index}: {variant.label:<32} {samples[-1].total:6.1f} tokens/s")
        return samples


def measure(turns: Turns, config: Config, count: int, known: Sequence[Sample]) -> Iterator[Sample]:
    """Rounds not yet in `known` for any of the chosen peers, until the seconds are over."""
    ends = time.monotonic() + config.seconds
    variants = [variant for peer in config.chosen for variant in peer.variants]
    seen = complete(known, lambda at_once: {one.name for one in variants if one.batches or at_once == 1})
    for at_once in config.concurrency:
        rounds = range(count * config.passes if at_once == 1 else config.repetitions)
        if all((at_once, index) in seen for index in rounds):
            continue
        turns.warm_up(at_once, config.max_tokens)
        for index in rounds:
            if time.monotonic() > ends:
                say("the seconds are over: the next call goes on")
                return
            if (at_once, index) not in seen:
                yield from turns.round(index, at_once, config.max_tokens)


def main(argv: Sequence[str] | None = None) -> int:
    config = BENCH.read(Config, argv)
    peers = config.chosen
    model = Path(prepared_model(DEMO_MODEL, say))
    asked_prompts = read_prompts(config, config.limit, over_categories=True) if config.prompts else PROMPTS
    texts = list(asked_prompts.values())[: config.limit]
    prompts, stops = tokenized(model, texts)
    kept = read_samples(config, prompts)
    failures: dict[str, str] = {}
    if not config.report_only:
        with started(peers, config, model, failures) as children:
            if config.install_only:
                return 1 if failures else 0
            asked = {"prompts": prompts, "texts": texts, "stop_token_ids": stops}
            turns = Turns(peers, children, asked, failures, uuid.uuid4().hex[:8])
            for sample in measure(turns, config, len(texts), tuple(kept)):
                kept.append(sample)
                if config.samples is not None:
                    with config.samples.open("a") as file:
                        file.write(json.dumps(asdict(sample)) + "\n")
    report(kept, failures, stops, config, argv)
    return 1 if failures else 0


def read_samples(config: Config, prompts: Sequence[Sequence[int]]) -> list[Sample]:
    """Raises ConfigError for samples of other prompts or another most tokens, and for --report-only without any."""
    kept: list[Sample] = []
    if config.samples is not None and config.samples.is_file():
        try:
            kept = [Sample.read(json.loads(line)) for line in config.samples.read_text().splitlines()]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{config.samples} does not hold samples: {error!r}") from error
    for sample in kept:
        picked = [prompts[place] for place in places(len(prompts), sample.round_index, sample.at_once)]
        if sample.asked != fingerprint(picked, config.max_tokens):
            raise ConfigError(f"{config.samples} holds samples of other prompts or another --max-tokens")
    if config.report_only and not kept:
        raise ConfigError("--report-only needs --samples with a file that has some")
    return kept


def report(
    samples: Sequence[Sample],
    failures: Mapping[str, str],
    stops: Sequence[int],
    config: Config,
    argv: Sequence[str] | None,
) -> None:
    lines = rows(PEERS, samples, failures, stops)
    facts = {
        "max_tokens": config.max_tokens,
        "threads": config.threads,
        "failures": failures,
        # Answers stay in the file of the samples.
        "samples": [
            asdict(sample) | {"token_ids": None, "decoding": sample.decoding, "total": sample.total}
            for sample in samples
        ],
    }
    picture = "tokens/s in all" if samples else ""
    BENCH.publish(config, Table(HEADER, lines, labels=2), facts, picture, argv=argv)


if __name__ == "__main__":
    sys.exit(main())
