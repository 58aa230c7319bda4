"""The texts of a recording: made with the target in this process, or taken from a server and looked at with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lab.replay.folder import Meta, read_meta, write_meta
from lab.replay.recorded_texts import TargetText
from lab.replay.recorder import NUM_ROWS, SAVE_EVERY_S, Progress, Say, TextFile
from lab.replay.replay_prompts import Prompt
from lab.replay.target import RecordedTarget, TargetAnswer, encode
from moot.client import AnswerOptions, Client, StreamedAnswer
from moot.core.errors import ConfigError, MootError
from moot.core.noise import choice_seed
from moot.core.options import option_of
from moot.core.types import FinishReason, SamplingParams
from moot.model.backend import choose_runner
from moot.model.compute import ComputeOptions
from moot.model.loading.load import load_model
from moot.model.runner import ModelRunner

KV_TOKENS_PER_ROW = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """How texts are made. `num_candidates`: likeliest ids kept per place. Prompt number i is asked with `seed` + i."""

    model: str
    max_tokens: int = option_of(AnswerOptions, "max_tokens")
    temperature: float = 0.0
    seed: int = 0
    num_candidates: int = 8
    dtype: str = option_of(ComputeOptions, "dtype")
    batch_invariant: bool = True

    def params(self, number: int) -> SamplingParams:
        """As a router has them of such a request."""
        seed = choice_seed(self.seed + number, 0)
        return SamplingParams(temperature=self.temperature, max_tokens=self.max_tokens, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What texts do not depend on. `num_rows`: texts made at a time; `num_threads` None: torch's choice."""

    device: str = option_of(ComputeOptions, "device")
    num_threads: int | None = None
    num_rows: int = NUM_ROWS


def target_runner(plan: TextPlan, machine: Machine) -> ModelRunner:
    """What computes the target of a recording. Raises ModelRefused and ConfigError."""
    loaded = load_model(plan.model, machine.device, plan.dtype, num_threads=machine.num_threads)
    num_tokens = max(machine.num_rows, 1) * min(KV_TOKENS_PER_ROW, loaded.info.context_limit)
    return choose_runner(loaded, num_tokens, plan.batch_invariant)


def make_texts(
    folder: Path, plan: TextPlan, machine: Machine, prompts: Sequence[Prompt], say: Say, served_by: Client | None = None
) -> tuple[Meta, list[TargetText]]:
    """Record what is not recorded yet in `folder`. `served_by`: a server to ask, which must serve the same target.

    Raises ConfigError where the folder is of other texts, or the server's are not the target's.
    """
    settings = asdict(plan) | {"prompts": [prompt.name for prompt in prompts]}
    known = read_meta(folder)
    if known is not None and dict(known.settings) != settings:
        changed = sorted(name for name in settings if known.settings.get(name) != settings[name])
        raise ConfigError(f"{folder} holds a recording with other {', '.join(changed)}: choose another folder")
    file = TextFile(folder, [prompt.name for prompt in prompts])
    if known is not None and not file.missing:
        say("texts: recorded already")
        return known, file.texts
    rows = max(machine.num_rows, 1)
    runner = target_runner(plan, machine)
    target = RecordedTarget(runner, plan.num_candidates)
    loaded, info = runner.loaded, runner.info
    origin = "the target, plain decoding" if served_by is None else "a server, looked at with the target"
    origin += f"; numerics {runner.numerics_fingerprint}"
    meta = Meta(info.model, info.tokenizer_fingerprint, info.vocab_size, info.context_limit, origin, settings)
    write_meta(folder, meta)
    missing = set(file.missing)
    wanted = [(number, prompt) for number, prompt in enumerate(prompts) if prompt.name in missing]
    asked = [(encode(loaded.tokenizer, prompt.text), plan.params(number)) for number, prompt in wanted]
    progress = Progress(say, "texts", len(prompts) * plan.max_tokens, len(file.texts) * plan.max_tokens, "tokens")

    def step(count: int = 1) -> None:
        progress.step(count)
        file.save(SAVE_EVERY_S)

    if served_by is None:
        answers = target.answers(asked, rows, step)
    else:
        questions = [(prompt.text, plan.seed + number) for number, prompt in wanted]
        answers = _served(served_by, plan, questions, asked, target, step)
    for index, answer in answers:
        prompt = wanted[index][1]
        ids, params = asked[index]
        text = TargetText(
            prompt.name,
            prompt.category,
            ids,
            answer.output_token_ids,
            answer.top_candidates,
            answer.finish_reason,
            plan.max_tokens,
            plan.temperature,
            params.seed,
        )
        file.add(text)
        progress.step(plan.max_tokens - len(answer.output_token_ids))
    return meta, file.texts


def _served(
    client: Client,
    plan: TextPlan,
    questions: Sequence[tuple[str, int]],
    asked: Sequence[tuple[tuple[int, ...], SamplingParams]],
    target: RecordedTarget,
    step: Callable[[int], None],
) -> Iterator[tuple[int, TargetAnswer]]:
    """Texts of a server, one by one. `questions`: (text, seed). Whether they are the target's is looked at."""
    model = client.models()[0]
    for index, ((question, seed), (ids, params)) in enumerate(zip(questions, asked, strict=True)):
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "temperature": plan.temperature,
            "max_tokens": plan.max_tokens,
            "seed": seed,
            "num_speculative_tokens": 0,
            "return_token_ids": True,
        }
        found = StreamedAnswer()
        for piece in client.stream_chat(body, found):
            step(len(piece.token_ids))
        output = tuple(found.token_ids)
        if not output or found.finish_reason not in ("stop", "length"):
            raise MootError(f"the server sent no whole text with token ids for {question[:60]!r}")
        candidates, same = target.look(ids, output, params)
        if same < len(output) and plan.batch_invariant:
            raise ConfigError(
                f"the server's text of {question[:60]!r} is not that of {plan.model}: they part at token {same}. "
                "Give both the same --dtype and --batch-invariant, or say --batch-invariant off"
            )
        yield index, TargetAnswer(output, candidates, FinishReason(found.finish_reason))
