"""One forward pass for a batch, and the sample-and-match walk for each request in it.

Whatever goes wrong stays with the request that caused it: a forward pass that raises is repeated in halves until the
guilty request is alone; one without memory is repeated smaller, then with what can be skipped given up, at last without
its draft; a row of NaN ends its own session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moot.core.errors import RequestPoisoned, is_out_of_memory
from moot.core.scheduler import BatchItem
from moot.core.types import ROOT, Draft
from moot.model.inputs import SequenceInput
from moot.model.runner import ModelRunner
from moot.runtime.faults import act, fault
from services.verifier.sessions import PendingWork, Session
from services.verifier.walks import DeviceLost, Outcome, Prefilled, Sampled, Walks, broken, is_device_lost, row_of_nodes

Item = BatchItem[Session]


class StepRunner:
    """Runs steps: one forward pass and the walks. Not thread-safe: the compute thread owns it. `progress` is called
    often while something is computed."""

    def __init__(
        self,
        runner: ModelRunner,
        walks: Walks,
        progress: Callable[[], None],
        keeps_states: bool = False,
        spare: Callable[[], bool] = lambda: False,
        on_shortage: Callable[[str], None] = lambda cost: None,
    ) -> None:
        """`keeps_states`: outcomes carry hidden states. `spare` gives up memory that nothing depends on; False: there
        is none. `on_shortage` is told what an allocation that failed has cost: one of metrics.OUT_OF_MEMORY."""
        self._spare = spare
        self._on_shortage = on_shortage
        self._runner = runner
        self.walks = walks
        self._progress = progress
        self._keeps_states = keeps_states
        self._states: dict[int, Tensor] = {}
        """Of this step, by session: as its logits, row by row."""
        self._guess_logits: dict[int, Tensor] = {}
        """Likewise, the rows after those of prefix and draft."""
        if keeps_states:
            runner.keep_states()

    def run(self, items: Sequence[Item]) -> list[Outcome]:
        """Feed `items` and advance their sessions. One outcome per item. Raises DeviceLost only."""
        self._states, self._guess_logits = {}, {}
        results = self._forward(items)
        self.walks.draw(
            [
                (item.session, item.session.work, result)
                for item, result in results
                if item.completes and item.session.work is not None and isinstance(result, Tensor)
            ]
        )
        return [self._outcome(item, result) for item, result in results]

    def _outcome(self, item: Item, result: Tensor | Exception) -> Outcome:
        try:
            try:
                return self._advance(item, result)
            except Exception as error:
                work = item.session.work
                if work is None or work.is_opening or not _may_be_the_drafts(error, work):
                    raise
                if is_out_of_memory(error):
                    self._on_shortage("draft")
                return self._advance(*self._without_drafts(item, work))
        except DeviceLost:
            raise
        except Exception as error:  # one request's failure must not reach the others
            if is_device_lost(error):
                raise DeviceLost(str(error)) from error
            if is_out_of_memory(error):
                self._on_shortage("request")
            return broken(item.session, error)

    def _without_drafts(self, item: Item, work: PendingWork) -> tuple[Item, Tensor | Exception]:
        """The item of a verification, computed again as if nothing had ever been drafted, which changes no token.

        Keys and values of a draft token that are not finite reach other tokens through the mask (0 times NaN is NaN),
        and its rows need memory, but a draft decides nothing: a request fails only where plain decoding fails.
        """
        session = item.session
        self.walks.forget(session)
        session.cache.wipe()
        session.work = PendingWork.verification(Draft(), session.max_new, work.round_index, work.arrived_ns)
        ((item, result),) = self._forward([item])
        return item, result

    def _forward(self, items: Sequence[Item]) -> list[tuple[Item, Tensor | Exception]]:
        """Logits per item, [rows, vocab] float32; an exception for an item that fails on its own."""
        try:
            progress = self._faulty(items) or self._progress
            logits = self._runner.forward([_input_of(item) for item in items], progress)
            if self._keeps_states:
                states = self._runner.states()
                self._states.update({item.session.arrival: one for item, one in zip(items, states, strict=True)})
            return [(item, self._without_guesses(item, rows)) for item, rows in zip(items, logits, strict=True)]
        except Exception as error:  # which of the requests raised is found out by halving
            if is_device_lost(error):
                raise DeviceLost(str(error)) from error
            if is_out_of_memory(error):
                # Its frames hold what the failed pass had allocated.
                error.__traceback__ = None
            for item in items:
                item.session.cache.crop(item.session.cache.length)
            return self._smaller(items, error)

    def _smaller(self, items: Sequence[Item], error: Exception) -> list[tuple[Item, Tensor | Exception]]:
        """What is to be done instead of a pass that raised `error`."""
        is_short = is_out_of_memory(error)
        if len(items) > 1:
            if is_short:
                self._on_shortage("step")
            middle = len(items) // 2
            return [*self._forward(items[:middle]), *self._forward(items[middle:])]
        (item,) = items
        if is_short and self._spare():
            self._on_shortage("prefix")
            return self._forward(items)
        if is_short and item.num_prefix_tokens > 1:
            self._on_shortage("step")
            return self._forward([BatchItem(item.session, item.num_prefix_tokens // 2, False)])
        return [(item, error)]

    def _faulty(self, items: Sequence[Item]) -> Callable[[], None] | None:
        """The fault point `verifier.forward`; `memory:TOKENS`: a pass of more than so many fails at its second tile,
        with all caches grown and half written."""
        for item in items:
            act(found := fault("verifier.forward", item.session.request_id))
            if found and found.action == "raise":
                raise RuntimeError("fault point verifier.forward")
            if found and found.action == "memory" and sum(item.num_tokens for item in items) > int(found.argument):
                return _failing_after(1)
        return None

    def _advance(self, item: Item, logits: Tensor | Exception) -> Outcome:
        """Advance a session by its walk. Raises what the forward pass came to, and what sampling finds; then the
        session has not changed."""
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
            self.walks.forget(session)
        walked, rows = self.walks.walk(session, session.work, logits)
        logprobs = self.walks.logprobs(session, logits, rows, walked.output_token_ids)
        top_candidates = self.walks.top_candidates(session, logits, rows)
        if walked.finish is None:
            row_of = row_of_nodes(session.work)
            last = item.num_prefix_tokens - 1
            path = [last + row_of[node] for node in walked.accepted_nodes]
            session.cache.commit([*range(item.num_prefix_tokens), *path])
            session.cached_length = session.cache.length
        session.token_ids.extend(walked.output_token_ids)
        session.history.append(walked.output_token_ids)
        session.work = None
        states = self._states.get(session.arrival)
        state = states[rows[-1]] if states is not None and rows else None
        return Sampled(session, walked, logprobs, top_candidates, state, self._guess_logits.get(session.arrival))

    def _without_guesses(self, item: Item, logits: Tensor) -> Tensor:
        """The rows that the walk goes over, those of guesses left out."""
        work = item.session.work
        if work is None or not item.completes or not work.guesses.token_ids:
            self._guess_logits.pop(item.session.arrival, None)
            return logits
        count = len(logits) - len(work.guesses.token_ids)
        self._guess_logits[item.session.arrival] = logits[count:]
        return logits[:count]


def _failing_after(count: int) -> Callable[[], None]:
    left = count

    def progress() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise torch.OutOfMemoryError("fault point verifier.forward")

    return progress


def _may_be_the_drafts(error: Exception, work: PendingWork) -> bool:
    """Whether a verification may succeed without what was drafted, now or (a poisoned row only) before."""
    has_rows = bool(work.fed_nodes or work.guesses.token_ids)
    return isinstance(error, RequestPoisoned) or (is_out_of_memory(error) and has_rows)


def _input_of(item: Item) -> SequenceInput:
    """The input of one item: missing tokens of the prefix, then the draft's fed nodes, then guesses; logits from the
    last prefix token on."""
    session, count = item.session, item.num_prefix_tokens
    token_ids = session.token_ids[session.cached_length : session.cached_length + count]
    if not item.completes or session.work is None:
        return SequenceInput(session.cache, token_ids, None, ())
    draft, fed = session.work.draft, session.work.fed_nodes
    row_of = row_of_nodes(session.work)
    parents = [*range(-1, count - 1), *(count - 1 + row_of[draft.parents[node]] for node in fed)]
    token_ids += [draft.token_ids[node] for node in fed]
    guesses, first = session.work.guesses, count + len(fed)
    parents += [count - 1 if parent == ROOT else first + parent for parent in guesses.parents]
    token_ids += guesses.token_ids
    is_chain = all(parent == index - 1 for index, parent in enumerate(parents))
    return SequenceInput(session.cache, token_ids, None if is_chain else parents, range(count - 1, len(token_ids)))
