"""How much of what a drafter kind proposes is right, by asking it at every position of held-out answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from moot.core.types import SamplingParams
from moot.proposers.base import Ask, Proposer
from moot.training.acceptance import LONGEST, MOST_MEASURED, Stream, report
from moot.training.dataset import Text
from moot.training.script import ANSWERS


def measure_kind(proposer: Proposer[Any], text: Text) -> dict[str, float]:
    """As `acceptance.report` gives it, on the rows of `text` that nothing is learned from."""
    streams: list[Stream] = []
    measured = 0
    for context, roles, _ in text.contexts():
        ids: list[int] = context.tolist()
        right = np.zeros(len(ids), np.int64)
        session = proposer.open((), SamplingParams())
        for position, token in enumerate(ids):
            proposer.extend(session, [token])
            if position + 1 < len(ids) and roles[position + 1] in ANSWERS:
                (chains,) = proposer.propose([Ask(session, LONGEST)])
                right[position] = _num_right(chains[0].token_ids, ids[position + 1 :]) if chains else 0
        proposer.close(session)
        streams.append(Stream(roles, right))
        measured += int(np.isin(roles, ANSWERS).sum())
        if measured >= MOST_MEASURED:
            break
    return report(streams)


def _num_right(chain: tuple[int, ...], following: list[int]) -> int:
    count = 0
    for guess, token in zip(chain, following, strict=False):
        if guess != token:
            break
        count += 1
    return count
