"""What drafters attached to the verifier propose at every place of recorded texts: the target reads each text once
more."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from lab.replay.proposals import ProposalRecord
from lab.replay.recorded_texts import TargetText
from lab.replay.target import CHUNK_TOKENS
from moot.core.history import History
from moot.core.types import Proposal
from moot.drafters.attached.attached_interface import AttachedAsk, AttachedDrafter
from moot.model.cache.kv_cache import KvCache
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner


def record_attached(drafter: AttachedDrafter, runner: ModelRunner, text: TargetText, record: ProposalRecord) -> None:
    """Ask `drafter` at every place of `text`, as a verifier does after having committed that place's token.

    The time is that of an ask that shares its pass with no other.
    """
    facts, ids = record.facts, [*text.prompt_token_ids, *text.output_token_ids]
    first = len(text.prompt_token_ids)
    cache = runner.new_cache()
    said: list[tuple[list[Proposal], float]] = []
    try:
        states = read(runner, cache, ids[:-1], first - 1)
        # From the end on: the cache is cut back to what it holds at each place.
        for place in reversed(range(text.num_places)):
            cache.crop(first + place)
            known = ids[: first + place + 1]
            history = History(text.prompt_token_ids, known[first:])
            wanted = (facts.num_speculative_tokens, facts.width)
            ask = AttachedAsk(known, text.params, history, states[place], *wanted, cache=cache)
            begin = time.perf_counter()
            (chains,) = drafter.propose([ask])
            said.append((chains[: facts.width], time.perf_counter() - begin))
    finally:
        cache.free()
    for chains, seconds in reversed(said):
        record.add_place(chains, 0.0, seconds)
    record.end_text()


def read(runner: ModelRunner, cache: KvCache, token_ids: list[int], first: int) -> Tensor:
    """Feed `token_ids`; the target's hidden states from index `first` on, [len(token_ids) - first, width]."""
    runner.keep_states()
    found: list[Tensor] = []
    for start in range(0, len(token_ids), CHUNK_TOKENS):
        chunk = token_ids[start : start + CHUNK_TOKENS]
        wanted = range(max(first - start, 0), len(chunk))
        runner.forward([SequenceInput(cache, chunk, None, wanted)])
        cache.commit(range(len(chunk)))
        if len(wanted):
            found += runner.states()
    return torch.cat(found)
