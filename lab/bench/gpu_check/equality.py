"""gpu_check: texts with drafts against plain decoding, by the runner and the sampler, with the gaps of mismatches."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from lab.bench.gpu_check.subject import Subject
from moot.core.acceptance import walk
from moot.core.history import History
from moot.core.types import ROOT, Draft, SamplingParams
from moot.model.gpu.gpu_runner import GpuRunner
from moot.model.inputs import SequenceInput
from moot.model.sampling.batch import BatchSampler, RowSpec
from moot.model.sampling.sampler import Sampler

Facts = list[tuple[str, str]]


class _Writer:
    """Writes texts of several requests at once. Records the gap of the two best scores that plain decoding saw."""

    def __init__(self, subject: Subject, runner: GpuRunner, prompts: Sequence[list[int]], length: int) -> None:
        self._subject, self._runner, self._prompts, self._length = subject, runner, prompts, length
        self._sampler = BatchSampler(Sampler(runner.info.vocab_size, frozenset()))
        kinds = (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.8, seed=5),
            SamplingParams(temperature=1.0, top_p=0.9, seed=6),
        )
        self.params = [kinds[index % len(kinds)] for index in range(len(prompts))]
        self.gaps: list[list[float]] = [[] for _ in prompts]

    def write(self, drafts: Sequence[list[int]] | None) -> tuple[list[list[int]], int]:
        """Texts, and how many drafted tokens were accepted. `drafts`: true continuations; None: plain decoding."""
        draw = random.Random(0)
        caches = [self._runner.new_cache() for _ in self._prompts]
        texts: list[list[int]] = [[] for _ in self._prompts]
        for cache, prompt in zip(caches, self._prompts, strict=True):
            self._runner.forward([SequenceInput(cache, prompt[:-1], None, ())])
            cache.commit(range(len(prompt) - 1))
        accepted = 0
        while live := [index for index, text in enumerate(texts) if len(text) < self._length]:
            self._subject.tick()
            round_of = {
                index: Draft() if drafts is None else _draft(drafts[index][len(texts[index]) :], draw) for index in live
            }
            inputs, specs = [], []
            for index in live:
                draft, whole = round_of[index], self._prompts[index] + texts[index]
                parents = [ROOT, *(parent + 1 for parent in draft.parents)]
                count = 1 + len(draft)
                inputs.append(SequenceInput(caches[index], [whole[-1], *draft.token_ids], parents, range(count)))
                specs += self._specs(index, texts[index], draft, len(whole))
            logits = self._runner.forward(inputs)
            drawn = iter(self._sampler.draw(torch.cat(logits), specs))
            for index, rows in zip(live, logits, strict=True):
                tokens = [next(drawn).token_id for _ in rows]
                if drafts is None:
                    best = rows[0].double().topk(2).values
                    self.gaps[index].append(float(best[0] - best[1]))
                walked = walk(
                    round_of[index],
                    lambda node, _, tokens=tokens: tokens[node + 1],  # type: ignore[misc]  # ROOT is -1: row 0
                    lambda token, number: False,
                    self._length - len(texts[index]),
                )
                caches[index].commit([0, *(node + 1 for node in walked.accepted_nodes)])
                texts[index] += walked.output_token_ids
                accepted += walked.num_accepted
        for cache in caches:
            cache.free()
        return texts, accepted

    def _specs(self, index: int, text: list[int], draft: Draft, position: int) -> list[RowSpec]:
        history = History(self._prompts[index], text)
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(draft.token_ids, draft.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        return [RowSpec(self.params[index], position + len(path), history.with_path(path)) for path in paths]


def _draft(true: Sequence[int], draw: random.Random) -> Draft:
    """Up to 5 true tokens, half of them with a wrong one at a drawn place, a third as a tree with wrong siblings."""
    ids = list(true[: draw.randrange(6)])
    if ids and draw.random() < 0.5:
        at = draw.randrange(len(ids))
        ids[at] = (ids[at] + 1) % 256
    chain = Draft.chain(tuple(ids))
    if not ids or draw.random() < 0.67:
        return chain
    # The wrong sibling of the first token comes before it, so that the accepted path must be moved.
    return Draft(((ids[0] + 2) % 256, *ids), (ROOT, ROOT, *range(1, len(ids))))


def _compare(subject: Subject, is_batch_invariant: bool) -> Facts:
    runner = subject.text_runner(is_batch_invariant)
    length = 24 if subject.is_small else 96
    draw = random.Random(1)
    prompts = [[draw.randrange(256) for _ in range(60 + 97 * index % 900)] for index in range(12)]
    writer = _Writer(subject, runner, prompts, length)
    plain, _ = writer.write(None)
    found, accepted = writer.write(plain)
    partings = []
    for index, (ours, theirs) in enumerate(zip(found, plain, strict=True)):
        at = next((at for at in range(length) if ours[at] != theirs[at]), None)
        if at is not None:
            partings.append((index, at, writer.gaps[index][at]))
    facts = [
        ("texts equal", f"{len(plain) - len(partings)} of {len(plain)}, {length} tokens each"),
        ("drafted tokens accepted", str(accepted)),
        *(
            (
                f"text {index} parts at {at}",
                f"gap of the two best logits {gap:.4g}, {writer.params[index].temperature=}",
            )
            for index, at, gap in partings
        ),
    ]
    assert accepted > len(plain), facts
    if is_batch_invariant:
        assert not partings, facts
    # With noise the two best logits need not be the two best scores: only greedy texts have a bound.
    greedy = [gap for index, _, gap in partings if writer.params[index].is_greedy]
    assert all(gap <= subject.epsilon for gap in greedy), facts
    return facts


def natural(subject: Subject) -> Facts:
    return _compare(subject, False)


def batch_invariant(subject: Subject) -> Facts:
    return _compare(subject, True)
