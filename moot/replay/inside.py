"""What drafters inside the verifier propose at every place of recorded texts: the target reads each text once more."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from moot.core.history import History
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.proposers.inside import InsideAsk, InsideDrafter
from moot.replay.proposals import ProposalRecord
from moot.replay.target import CHUNK_TOKENS
from moot.replay.texts import TargetText


def record_inside(drafter: InsideDrafter, runner: ModelRunner, text: TargetText, record: ProposalRecord) -> None:
    """Ask `drafter` at every place of `text`, as a verifier does after having committed that place's token.

    The time is that of an ask that shares its pass with no other.
    """
    facts, ids = record.facts, [*text.prompt_token_ids, *text.output_token_ids]
    first = len(text.prompt_token_ids)
    states = states_of(runner, ids[:-1], first - 1)
    history = History(text.prompt_token_ids)
    for place in range(text.num_places):
        history.append(ids[first + place : first + place + 1])
        known = ids[: first + place + 1]
        ask = InsideAsk(known, text.params, history, states[place], facts.num_speculative_tokens, facts.width)
        begin = time.perf_counter()
        (chains,) = drafter.propose([ask])
        record.add_place(chains[: facts.width], 0.0, time.perf_counter() - begin)
    record.end_text()


def states_of(runner: ModelRunner, token_ids: list[int], first: int) -> Tensor:
    """The target's hidden states after `token_ids` from index `first` on, [len(token_ids) - first, width]."""
    runner.keep_states()
    cache = runner.new_cache()
    found: list[Tensor] = []
    try:
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            chunk = token_ids[start : start + CHUNK_TOKENS]
            wanted = range(max(first - start, 0), len(chunk))
            runner.forward([SequenceInput(cache, chunk, None, wanted)])
            cache.commit(range(len(chunk)))
            if len(wanted):
                found += runner.states()
    finally:
        cache.free()
    return torch.cat(found)
