"""One forward pass for a batch, and the sample-and-match walk for each request in it.

Whatever goes wrong stays with the request that caused it: a forward pass that raises is repeated in halves until the
guilty request is alone; one without memory is repeated smaller, at last without its draft; a row of NaN ends its own
session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.acceptance import Walk, walk
from moot.core.errors import NoCapacity, RequestPoisoned
from moot.core.scheduler import BatchItem
from moot.core.types import ROOT, Draft, TokenLogprobs
from moot.faults import act, fault
from moot.model.batch_sampler import BatchSampler, Drawn, RowSpec
from moot.model.runner import ModelRunner, SequenceInput
from moot.model.sampler import Sampler
from services.verifier.candidates import likeliest
from services.verifier.commands import FailureCode
from services.verifier.sessions import Session, Work

_log = logging.getLogger("moot.verifier")

Item = BatchItem[Session]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A chunk of the prefix got its KV; nothing to answer yet."""

    session: Session


@dataclass(frozen=True, slots=True)
class Sampled:
    """The session's work is done and its state advanced by `walk`; one entry per output token in the others."""

    session: Session
    walk: Walk
    logprobs: tuple[TokenLogprobs, ...]
    top_candidates: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Broken:
    """This session cannot go on."""

    session: Session
    code: FailureCode
    message: str


Outcome = Prefilled | Sampled | Broken


class DeviceLost(RuntimeError):
    """The accelerator's context is gone: nothing in this process can be computed any more."""


class StepRunner:
    """Not thread-safe: the compute thread owns it. `progress` is called often while something is computed.

    With a `batch_sampler` all rows of a step are drawn at once, before the walks, and fetched in one piece; without
    one, rows are drawn as the walks ask for them, so that those off the accepted path cost nothing.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        progress: Callable[[], None],
        batch_sampler: BatchSampler | None = None,
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._progress = progress
        self._batch_sampler = batch_sampler
        self._drawn: dict[int, list[Drawn]] = {}
        """What was drawn at once in this step, by session: one entry per row of its logits."""

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Feed `items` and advance their sessions. One outcome per item. Raises DeviceLost only."""
        results = self._forward(items)
        self._drawn = self._draw_all(results)
        return [self._outcome(item, result) for item, result in results]

    def _draw_all(self, results: Sequence[tuple[Item, Tensor | Exception]]) -> dict[int, list[Drawn]]:
        """Empty where rows are drawn one by one: without a batch sampler, or where it fails, whoever's fault it is."""
        if self._batch_sampler is None:
            return {}
        logits: list[Tensor] = []
        specs: list[RowSpec] = []
        counts: dict[int, int] = {}
        try:
            for item, result in results:
                if item.completes and item.session.work is not None and isinstance(result, Tensor):
                    own = _row_specs(item.session, item.session.work, self._sampler.vocab_size)
                    logits.append(result)
                    specs += own
                    counts[item.session.arrival] = len(own)
            if not specs:
                return {}
            drawn = iter(self._batch_sampler.draw(torch.cat(logits), specs))
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error
        except Exception as error:  # noqa: BLE001 - drawn row by row, it fails for the request that causes it
            _log.warning("rows are drawn one by one", exc_info=error)
            return {}
        return {arrival: [next(drawn) for _ in range(count)] for arrival, count in counts.items()}

    def _outcome(self, item: Item, result: Tensor | Exception) -> Outcome:
        try:
            try:
                return self._advance(item, result)
            except Exception as error:
                work = item.session.work
                if work is None or work.is_opening or not _may_be_the_drafts(error, work):
                    raise
                return self._advance(*self._without_drafts(item, work))
        except DeviceLost:
            raise
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error
        except Exception as error:  # noqa: BLE001 - one request's failure must not reach the others
            return self._broken(item.session, error)

    def _without_drafts(self, item: Item, work: Work) -> tuple[Item, Tensor | Exception]:
        """The item of a verification, computed again as if nothing had ever been drafted, which changes no token.

        Keys and values of a draft token that are not finite reach other tokens through the mask (0 times NaN is NaN),
        and its rows need memory, but a draft decides nothing: a request fails only where plain decoding fails.
        """
        session = item.session
        self._drawn.pop(session.arrival, None)
        session.cache.wipe()
        session.work = Work.verification(Draft(), session.max_new, work.round_index, work.arrived_ns)
        ((item, result),) = self._forward([item])
        return item, result

    def _forward(self, items: Sequence[Item]) -> list[tuple[Item, Tensor | Exception]]:
        """Logits per item, [rows, vocab] float32; an exception for an item that fails on its own."""
        try:
            for item in items:
                act(found := fault("verifier.forward", item.session.request_id))
                if found and found.action == "raise":
                    raise RuntimeError("fault point verifier.forward")
                if found and found.action == "memory" and sum(item.num_tokens for item in items) > int(found.argument):
                    raise torch.OutOfMemoryError("fault point verifier.forward")
            logits = self._runner.forward([_input_of(item) for item in items], self._progress)
            return list(zip(items, logits, strict=True))
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error
        except Exception as error:  # noqa: BLE001 - which of the requests raised is found out by halving
            if is_out_of_memory(error):
                # Its frames hold what the failed pass had allocated.
                error.__traceback__ = None
            for item in items:
                item.session.cache.crop(item.session.cache.length)
            if len(items) > 1:
                middle = len(items) // 2
                return [*self._forward(items[:middle]), *self._forward(items[middle:])]
            (item,) = items
            if is_out_of_memory(error) and item.num_prefix_tokens > 1:
                return self._forward([BatchItem(item.session, item.num_prefix_tokens // 2, False)])
            return [(item, error)]

    def _advance(self, item: Item, logits: Tensor | Exception) -> Outcome:
        """Raises what the forward pass came to, and what sampling finds; then the session has not changed."""
        if isinstance(logits, Exception):
            raise logits
        session = item.session
        if not item.completes or session.work is None:
            session.cache.commit(range(item.num_prefix_tokens))
            session.cached_length = session.cache.length
            return Prefilled(session)
        act(found := fault("verifier.logits", session.request_id))
        if found and found.action == "nan":
            logits = torch.full_like(logits, torch.nan)
            self._drawn.pop(session.arrival, None)
        walked, rows = self.sample(session, session.work, logits)
        logprobs = self._logprobs(session, logits, rows, walked.output_token_ids)
        top_candidates = self._top_candidates(session, logits, rows)
        if walked.finish is None:
            row_of = row_of_nodes(session.work)
            last = item.num_prefix_tokens - 1
            path = [last + row_of[node] for node in walked.accepted_nodes]
            session.cache.commit([*range(item.num_prefix_tokens), *path])
            session.cached_length = session.cache.length
        session.token_ids.extend(walked.output_token_ids)
        session.history.append(walked.output_token_ids)
        session.work = None
        return Sampled(session, walked, logprobs, top_candidates)

    def sample(self, session: Session, work: Work, logits: Tensor) -> tuple[Walk, list[int]]:
        """The walk through the draft, and the row of `logits` that each output token was sampled from.

        logits: [1 + fed nodes, vocab]; row 0 follows the prefix. Raises RequestPoisoned.
        """
        row_of = row_of_nodes(work)
        params, sampler = session.params, self._sampler
        known: list[int | None] | None = None
        if drawn := self._drawn.get(session.arrival):
            known = [one.token_id for one in drawn]
        elif not sampler.needs_row(params, session.num_output_tokens):
            known = sampler.greedy_rows(logits)
        rows: list[int] = []

        def token_at(node: int, path: tuple[int, ...]) -> int:
            row = row_of[node]
            rows.append(row)
            self._progress()
            if known is None:
                position = session.length + len(path)
                return sampler.sample(logits[row], params, position, session.history.with_path(path))
            token = known[row]
            if token is None:
                raise RequestPoisoned("the model's logits are not finite")
            return token

        def is_end(token: int, _: int) -> bool:
            # min_tokens needs no rule here: before it the sampler masks these ids.
            return token in session.ending_token_ids

        return walk(work.draft, token_at, is_end, session.max_new), rows

    def _logprobs(
        self, session: Session, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        num_top = session.params.logprobs
        if num_top is None:
            return ()
        if drawn := self._drawn.get(session.arrival):
            return tuple(entry for row in rows if (entry := drawn[row].logprobs) is not None)
        pairs = zip(rows, token_ids, strict=True)
        return tuple(self._sampler.logprobs(logits[row], token_id, num_top) for row, token_id in pairs)

    def _top_candidates(self, session: Session, logits: Tensor, rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        width = min(session.num_top_candidates, self._sampler.vocab_size)
        if not width or not rows:
            return ()
        if drawn := self._drawn.get(session.arrival):
            return tuple(drawn[row].candidates for row in rows)
        return tuple(likeliest(logits[list(rows), : self._sampler.vocab_size], width))

    def _broken(self, session: Session, error: Exception) -> Broken:
        if isinstance(error, RequestPoisoned):
            return Broken(session, FailureCode.POISONED, str(error))
        if is_out_of_memory(error):
            return Broken(session, FailureCode.NO_CAPACITY, "no memory for this request")
        # The text of an unknown error may quote what a user wrote: only its name leaves this process.
        _log.error("a request failed", exc_info=error, extra={"failed_request_id": session.request_id})
        return Broken(session, FailureCode.INTERNAL, f"internal error ({type(error).__name__})")


def row_of_nodes(work: Work) -> dict[int, int]:
    """Row of the logits by draft node: row 0 follows the prefix."""
    return {ROOT: 0} | {node: row for row, node in enumerate(work.fed_nodes, start=1)}


def _row_specs(session: Session, work: Work, vocab_size: int) -> list[RowSpec]:
    """How each row of the logits is drawn, as `row_of_nodes` numbers them."""
    paths: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node in work.fed_nodes:
        paths[node] = (*paths[work.draft.parents[node]], work.draft.token_ids[node])
    return [
        RowSpec(
            session.params,
            session.length + len(path),
            session.history.with_path(path),
            session.params.logprobs,
            min(session.num_top_candidates, vocab_size),
        )
        for path in paths.values()
    ]


def is_out_of_memory(error: Exception) -> bool:
    """torch raises a plain RuntimeError when the host's allocator has nothing left."""
    kinds = NoCapacity | torch.OutOfMemoryError | MemoryError
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


def _may_be_the_drafts(error: Exception, work: Work) -> bool:
    """Whether a verification may succeed without what was drafted, now or (a poisoned row only) before."""
    return isinstance(error, RequestPoisoned) or (is_out_of_memory(error) and bool(work.fed_nodes))


def _input_of(item: Item) -> SequenceInput:
    """Missing tokens of the prefix, then the draft's fed nodes; logits of the last prefix token and of each node."""
    session, count = item.session, item.num_prefix_tokens
    token_ids = session.token_ids[session.cached_length : session.cached_length + count]
    if not item.completes or session.work is None:
        return SequenceInput(session.cache, token_ids, None, ())
    draft, fed = session.work.draft, session.work.fed_nodes
    row_of = row_of_nodes(session.work)
    parents = [*range(-1, count - 1), *(count - 1 + row_of[draft.parents[node]] for node in fed)]
    token_ids += [draft.token_ids[node] for node in fed]
    is_chain = all(parent == index - 1 for index, parent in enumerate(parents))
    return SequenceInput(session.cache, token_ids, None if is_chain else parents, range(count - 1, count + len(fed)))
