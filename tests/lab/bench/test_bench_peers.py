"""The comparison with other systems: which prompts, the children's protocol, the table."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from lab.bench.harness.prompts import evenly, held_out
from lab.bench.peers.__main__ import BENCH, Config, read_samples
from lab.bench.peers.catalogue import PEERS, chosen
from lab.bench.peers.environments import build_flags
from lab.bench.peers.figures import HEADER, Sample, complete, fingerprint, rows
from lab.bench.peers.protocol import Child, PeerFailed
from moot.core.errors import ConfigError

CHILDREN = Path(__file__).parents[3] / "lab" / "bench" / "peers" / "children"
ECHO = """
import sys; sys.path.insert(0, {children!r})
from lines import Clock, serve
import time
def answer(request):
    if request["variant"] == "bad":
        raise ValueError("no such thing")
    if request["variant"] == "gone":
        print("the last words", file=sys.stderr, flush=True); import os; os._exit(3)
    print("noise on stdout")
    clock = Clock(time.perf_counter()); clock.tick()
    return [clock.answer(prompt) for prompt in request["prompts"]]
serve(answer)
"""


@pytest.fixture
def child(tmp_path: Path):
    script = ECHO.format(children=str(CHILDREN))
    made = Child([sys.executable, "-c", script], tmp_path / "log", {}, 30)
    yield made
    made.close()


def test_prompts_are_even_over_categories_and_held_out() -> None:
    """Only ids ending in 7 are held out, and each category comes once before any comes twice."""
    lines = [{"question_id": number, "category": "ab"[number > 50], "turns": ["x"]} for number in range(100)]
    picked = evenly(held_out(lines), 4)
    assert [line["question_id"] for line in picked] in ([7, 57, 17, 67], [57, 7, 67, 17])


def test_child_answers_errors_and_goes_on(child: Child) -> None:
    """An error is told with its words and the child still answers; what libraries print is no answer."""
    with pytest.raises(PeerFailed, match="no such thing"):
        child.ask({"variant": "bad", "prompts": [[1]]}, 30)
    assert [a["token_ids"] for a in child.ask({"variant": "x", "prompts": [[1, 2], [3]]}, 30)] == [[1, 2], [3]]


def test_child_that_ends_is_reported_with_its_last_lines(child: Child) -> None:
    """A peer that dies is reported with what it last wrote, not with a broken pipe."""
    with pytest.raises(PeerFailed, match="the last words"):
        child.ask({"variant": "gone", "prompts": [[1]]}, 30)


def test_child_that_cannot_start_is_reported(tmp_path: Path) -> None:
    """A failing start carries the error's own lines."""
    with pytest.raises(PeerFailed, match="ZeroDivisionError"):
        Child([sys.executable, "-c", "1/0"], tmp_path / "log", {}, 30)


def test_table_takes_ratios_within_a_round_and_names_failures() -> None:
    """Ratios pair samples of one run and round; changed texts are counted; a failed peer has its row and error."""

    def sample(run: str, variant: str, total_s: float, last: int) -> Sample:
        answer = {"token_ids": [5, last, 2], "first_s": total_s / 2, "total_s": total_s}
        return Sample.of(run, "asked", variant, 1, 0, [answer])

    samples = [sample("r", "off", 2.0, 6), sample("r", "on", 1.0, 6), sample("r", "plain", 4.0, 6)]
    samples += [sample("r", "prompt_lookup", 2.0, 7), sample("other", "q4", 0.1, 6)]
    found = {row[0]: dict(zip(HEADER, row, strict=True)) for row in rows(PEERS, samples, {"vllm": "no\nluck"}, [2])}
    assert found["Moot, drafting on"]["of its own plain"] == "2.00"
    assert found["Moot, drafting on"]["same texts as its plain"] == "1 of 1"
    assert found["transformers prompt lookup"]["same texts as its plain"] == "0 of 1"
    assert found["transformers generate"]["Moot on / it, in all"] == "4.00"
    assert found["llama.cpp 4-bit"]["Moot on / it, in all"] == "–"
    assert found["vllm: FAILED"]["same texts as its plain"] == "no luck"


def test_a_round_is_done_only_when_one_run_holds_all_of_it() -> None:
    """A round that was cut off is measured again: halves of two runs share no pair to take a ratio of."""

    def sample(run: str, variant: str, index: int) -> Sample:
        answer = {"token_ids": [5], "first_s": 0.1, "total_s": 0.2}
        return Sample.of(run, "asked", variant, 1, index, [answer])

    halves = [sample("a", "off", 0), sample("b", "on", 0)]
    whole = [sample("b", "off", 1), sample("b", "on", 1)]
    assert complete(halves + whole, lambda at_once: {"off", "on"}) == {(1, 1)}


def samples_file(folder: Path, max_tokens: int) -> Path:
    answer = {"token_ids": [5], "first_s": 0.1, "total_s": 0.2}
    kept = Sample.of("a", fingerprint([[1, 2]], max_tokens), "off", 1, 0, [answer])
    (folder / "samples").write_text(json.dumps(asdict(kept)) + "\n")
    return folder / "samples"


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1, 2], 9), ([1, 3], 8)])
def test_samples_of_another_question_are_refused(tmp_path: Path, prompt: list[int], max_tokens: int) -> None:
    """Samples are read back whole, and not mixed with those of other prompts or lengths."""
    file = str(samples_file(tmp_path, 8))
    assert len(read_samples(BENCH.read(Config, ["--samples", file, "--max-tokens", "8"]), [[1, 2]])) == 1
    with pytest.raises(ConfigError, match="other prompts"):
        read_samples(BENCH.read(Config, ["--samples", file, "--max-tokens", str(max_tokens)]), [prompt])


def test_unknown_peer_and_absent_processor_features() -> None:
    """A peer there is none of is refused by name; llama.cpp is built for no more than the processor has."""
    with pytest.raises(ConfigError, match="nobody"):
        chosen(["nobody"])
    assert "-DGGML_AVX512=OFF" in build_flags({"avx2"})
    assert "-DGGML_AVX2=ON" in build_flags({"avx2"})
