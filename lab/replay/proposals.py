"""What one drafter proposes at every place of the recorded texts: asked once, kept as arrays."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.replay.files import load_arrays, save_arrays
from lab.replay.recorded_texts import TargetText
from moot.core.errors import ConfigError
from moot.core.types import Proposal
from moot.drafters.interface import Ask, Drafter

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """`num_speculative_tokens`, `width`: what was asked for; a replay asks for no more. `num_bytes`: of the files that
    the drafter works with."""

    drafter_id: str
    kind: str
    family: str
    options: Mapping[str, str]
    num_speculative_tokens: int
    width: int
    num_bytes: int = 0


@dataclass(slots=True)
class ProposalRecord:
    """Answers of one drafter, place by place, text by text. Times in seconds: `told` the committed id, `asked`."""

    facts: DrafterFacts
    text_starts: list[int] = field(default_factory=lambda: [0])
    """Entry t: the number of the first place of text t; one more than there are texts."""
    chain_counts: array[int] = field(default_factory=lambda: array("B"))
    chain_lengths: array[int] = field(default_factory=lambda: array("B"))
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    confidences: array[int] = field(default_factory=lambda: array("B"))
    told_s: array[float] = field(default_factory=lambda: array("f"))
    asked_s: array[float] = field(default_factory=lambda: array("f"))

    @property
    def num_texts(self) -> int:
        return len(self.text_starts) - 1

    @property
    def num_places(self) -> int:
        return len(self.chain_counts)

    def add_place(self, chains: Sequence[Proposal], told_s: float, asked_s: float) -> None:
        self.chain_counts.append(len(chains))
        for chain in chains:
            self.chain_lengths.append(len(chain.token_ids))
            self.token_ids.extend(chain.token_ids)
            self.confidences.extend(chain.confidences)
        self.told_s.append(told_s)
        self.asked_s.append(asked_s)

    def end_text(self) -> None:
        self.text_starts.append(self.num_places)

    def of_text(self, index: int) -> list[tuple[Proposal, ...]]:
        """Per place of text `index` the proposals made there, best first."""
        first, end = self.text_starts[index], self.text_starts[index + 1]
        chain = sum(self.chain_counts[:first])
        token = sum(self.chain_lengths[:chain])
        places: list[tuple[Proposal, ...]] = []
        for place in range(first, end):
            proposals: list[Proposal] = []
            for _ in range(self.chain_counts[place]):
                stop = token + self.chain_lengths[chain]
                ids, confidences = self.token_ids[token:stop], self.confidences[token:stop]
                proposals.append(Proposal(tuple(ids), tuple(confidences), self.facts.drafter_id))
                chain, token = chain + 1, stop
            places.append(tuple(proposals))
        return places

    def seconds_of(self, index: int) -> list[float]:
        """Per place of text `index`: from the committed id to the proposals."""
        places = slice(self.text_starts[index], self.text_starts[index + 1])
        return [told + asked for told, asked in zip(self.told_s[places], self.asked_s[places], strict=True)]


def record_text(drafter: Drafter[Any], text: TargetText, record: ProposalRecord) -> None:
    """Ask `drafter` at every place of `text`. Its session is told what it is told live, id by id, in this order."""
    facts, rows = record.facts, text.top_candidates
    session = drafter.open(text.prompt_token_ids, text.params)
    try:
        while drafter.warm(session):
            pass
        for place in range(text.num_places):
            begin = time.perf_counter()
            drafter.extend(session, text.output_token_ids[place : place + 1], rows[place : place + 1])
            told = time.perf_counter()
            (chains,) = drafter.propose([Ask(session, facts.num_speculative_tokens, facts.width)])
            record.add_place(chains, told - begin, time.perf_counter() - told)
    finally:
        drafter.close(session)
    record.end_text()


def shortened(proposals: Sequence[Proposal], num_tokens: int, width: int) -> list[Proposal]:
    """What a drafter says when it is asked for less: the heads of its first `width` chains, no two of them equal."""
    heads: dict[tuple[int, ...], Proposal] = {}
    for one in proposals:
        ids = one.token_ids[:num_tokens]
        if ids and ids not in heads and len(heads) < width:
            heads[ids] = one.part(0, num_tokens)
    return list(heads.values())


def save_record(path: Path, record: ProposalRecord) -> None:
    facts = {name: getattr(record.facts, name) for name in DrafterFacts.__slots__}
    save_arrays(
        path,
        format=np.array([_FORMAT]),
        facts=np.array([json.dumps(facts | {"options": dict(record.facts.options)})], np.str_),
        text_starts=np.array(record.text_starts, np.int64),
        chain_counts=np.array(record.chain_counts, np.uint8),
        chain_lengths=np.array(record.chain_lengths, np.uint8),
        token_ids=np.array(record.token_ids, np.uint32),
        confidences=np.array(record.confidences, np.uint8),
        told_s=np.array(record.told_s, np.float32),
        asked_s=np.array(record.asked_s, np.float32),
    )


def load_record(path: Path) -> ProposalRecord:
    """Raises ConfigError where `path` is not a file of save_record."""
    arrays = load_arrays(path, "recorded proposals")
    if arrays["format"].tolist() != [_FORMAT]:
        raise ConfigError(f"recorded proposals {path} have another format: record them again")
    return ProposalRecord(
        DrafterFacts(**json.loads(str(arrays["facts"][0]))),
        arrays["text_starts"].tolist(),
        array("B", arrays["chain_counts"].tobytes()),
        array("B", arrays["chain_lengths"].tobytes()),
        array("I", arrays["token_ids"].tobytes()),
        array("B", arrays["confidences"].tobytes()),
        array("f", arrays["told_s"].tobytes()),
        array("f", arrays["asked_s"].tobytes()),
    )
