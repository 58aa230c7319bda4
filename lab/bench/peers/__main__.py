"""Moot and other systems side by side, interleaved prompt by prompt, in one run on this machine.

    python -m bench.peers [--peers moot,transformers,...] [--prompts FILE --held-out] [--concurrency 1 16]

Every peer gets the same token ids and the same most tokens, greedy. One that is not to speak is stopped. Environments
are made once under --venvs. --seconds ends a call early; the next with the same --samples goes on where it ended and
the table is of all calls; ratios are only taken within a round, which one call measures, and a round that was cut off
is measured again. --report-only makes the table of such a file. Without --prompts: the demo's five.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lab.bench.driving.prompts import held_out
from lab.bench.peers import gguf_files
from lab.bench.peers.catalogue import PEERS, Peer, chosen
from lab.bench.peers.environments import interpreter
from lab.bench.peers.figures import HEADER, Sample, complete, fingerprint, rows
from lab.bench.peers.prompts import evenly, text_of
from lab.bench.peers.protocol import Child, PeerFailed
from lab.bench.report import RESULTS, publish
from moot.commands.common import say
from moot.commands.demo import PROMPTS
from moot.commands.system import DEMO_MODEL, prepared_model
from moot.core.errors import ConfigError, MootError
from moot.shipped import cache_dir

CHILDREN = Path(__file__).parent / "children"
START_TIMEOUT_S = 600.0
TURN_TIMEOUT_S = 300.0


def parsed(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default=",".join(peer.name for peer in PEERS), help="which, with commas")
    parser.add_argument("--prompts", type=Path, help="JSON lines with `turns` or `prompt`, and `category`")
    parser.add_argument("--held-out", action="store_true", help="only those whose question_id ends in 7")
    parser.add_argument("--limit", type=int, default=8, help="prompts taken, evenly over the categories")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="requests at once")
    parser.add_argument("--passes", type=int, default=2, help="times each prompt is asked alone")
    parser.add_argument("--batch-rounds", type=int, default=7, help="rounds at each concurrency above 1")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round after so long")
    parser.add_argument("--samples", type=Path, help="file that samples are added to, and read from")
    parser.add_argument("--venvs", type=Path, default=cache_dir() / "peers")
    parser.add_argument("--install-only", action="store_true", help="make environments and files, measure nothing")
    parser.add_argument("--report-only", action="store_true", help="measure nothing: the table of --samples")
    return parser.parse_args(argv)


def read_texts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return list(PROMPTS.values())[: options.limit]
    lines = [json.loads(line) for line in options.prompts.read_text().splitlines() if line.strip()]
    return [text_of(line) for line in evenly(held_out(lines) if options.held_out else lines, options.limit)]


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


def start(peer: Peer, options: argparse.Namespace, model: Path) -> Child | None:
    """None where it was only to be installed. Raises PeerFailed or MootError."""
    python = interpreter(peer.environment, options.venvs)
    reads = gguf_files.prepare(options.venvs / "gguf") if peer.name == "llama_cpp" else model
    if options.install_only:
        return None
    command = [str(python), str(CHILDREN / peer.script), str(reads), str(options.threads), *peer.arguments]
    environ = {
        "TOKENIZERS_PARALLELISM": "false",
        # vLLM runs tools (ninja) that lie in its own environment; compiled code is kept beside it.
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "VLLM_CACHE_ROOT": str(options.venvs / "vllm-cache"),
        "MOOT_CACHE": str(cache_dir()),
    }
    if not peer.environment:
        environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    log = options.venvs / "logs" / f"{peer.name}.log"
    child = Child(command, log, environ, START_TIMEOUT_S, may_be_paused=peer.may_be_paused)
    say(f"{peer.name} is ready {child.ready.get('versions', {})}")
    return child


@contextmanager
def started(
    peers: Sequence[Peer], options: argparse.Namespace, model: Path, failures: dict[str, str]
) -> Iterator[dict[str, Child]]:
    """Those that start; the errors of the others go to `failures`."""
    children: dict[str, Child] = {}
    try:
        for peer in peers:
            say(f"starting {peer.name}")
            try:
                child = start(peer, options, model)
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


def measure(turns: Turns, options: argparse.Namespace, count: int, known: Sequence[Sample]) -> Iterator[Sample]:
    """Rounds not yet in `known` for any of the chosen peers, until the seconds are over."""
    ends = time.monotonic() + options.seconds
    peers = chosen(options.peers.split(","))
    seen = complete(
        known,
        lambda at_once: {one.name for peer in peers for one in peer.variants if one.batches or at_once == 1},
    )
    for at_once in options.concurrency:
        rounds = range(count * options.passes if at_once == 1 else options.batch_rounds)
        if all((at_once, index) in seen for index in rounds):
            continue
        turns.warm_up(at_once, options.max_tokens)
        for index in rounds:
            if time.monotonic() > ends:
                say("the seconds are over: the next call goes on")
                return
            if (at_once, index) not in seen:
                yield from turns.round(index, at_once, options.max_tokens)


def main() -> int:
    options = parsed(sys.argv[1:])
    try:
        peers = chosen(options.peers.split(","))
    except ValueError as error:
        say(str(error))
        return 2
    model = Path(prepared_model(DEMO_MODEL, say))
    texts = read_texts(options)
    prompts, stops = tokenized(model, texts)
    asked = {"prompts": prompts, "texts": texts, "stop_token_ids": stops}
    try:
        kept = read_samples(options, prompts)
    except MootError as error:
        say(str(error))
        return 2
    failures: dict[str, str] = {}
    if options.report_only:
        report(kept, failures, stops, options)
        return 0
    with started(peers, options, model, failures) as children:
        if options.install_only:
            return 1 if failures else 0
        turns = Turns(peers, children, asked, failures, uuid.uuid4().hex[:8])
        for sample in measure(turns, options, len(texts), tuple(kept)):
            kept.append(sample)
            if options.samples is not None:
                with options.samples.open("a") as file:
                    file.write(json.dumps(asdict(sample)) + "\n")
    report(kept, failures, stops, options)
    return 1 if failures else 0


def read_samples(options: argparse.Namespace, prompts: Sequence[Sequence[int]]) -> list[Sample]:
    """Raises ConfigError for samples of other prompts or another most tokens, and for --report-only without any."""
    kept: list[Sample] = []
    if options.samples is not None and options.samples.is_file():
        try:
            kept = [Sample.read(json.loads(line)) for line in options.samples.read_text().splitlines()]
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{options.samples} does not hold samples: {error!r}") from error
    for sample in kept:
        picked = [prompts[place] for place in places(len(prompts), sample.round_index, sample.at_once)]
        if sample.asked != fingerprint(picked, options.max_tokens):
            raise ConfigError(f"{options.samples} holds samples of other prompts or another --max-tokens")
    if options.report_only and not kept:
        raise ConfigError("--report-only needs --samples with a file that has some")
    return kept


def report(
    samples: Sequence[Sample], failures: dict[str, str], stops: Sequence[int], options: argparse.Namespace
) -> None:
    lines = rows(PEERS, samples, failures, stops)
    facts = {
        "max_tokens": options.max_tokens,
        "threads": options.threads,
        "failures": failures,
        "samples": [{**asdict(sample), "decoding": sample.decoding, "total": sample.total} for sample in samples],
    }

    def draw(figure: Any) -> None:
        counts = sorted({sample.at_once for sample in samples})
        for place, (count, axes) in enumerate(
            zip(counts, figure.subplots(1, len(counts), squeeze=False)[0], strict=True)
        ):
            bars = [
                (str(row[0]), float(str(row[HEADER.index("tokens/s in all")]).split()[0].replace(",", "")))
                for row in lines
                if row[1] == count
            ]
            axes.barh([name for name, _ in bars][::-1], [speed for _, speed in bars][::-1])
            axes.set_title(f"{count} at once")
            axes.set_xlabel("tokens/s in all" if place == 0 else "tokens/s in all, all requests")

    publish("peers", HEADER, lines, facts, draw if samples else None)
    print(f"results: {RESULTS / 'peers.json'}")


if __name__ == "__main__":
    sys.exit(main())
