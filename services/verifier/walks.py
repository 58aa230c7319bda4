"""The sample-and-match walk of each request of a step, over the rows of its logits.

`Sampled`, `Prefilled` and `Broken` are what a step makes of each request in it. An exception on the way makes a request
`Broken`, or is raised as `DeviceLost`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moot.core.acceptance import Walk, walk
from moot.core.errors import MootError, OutOfMemory, PeerError, RequestPoisoned, is_out_of_memory
from moot.core.types import ROOT, TokenLogprobs
from moot.model.sampling.batch import BatchSampler, Drawn, RowSpec
from moot.model.sampling.logits import joined
from moot.model.sampling.sampler import Sampler, likeliest
from services.verifier.sessions import PendingWork, Session

_log = logging.getLogger("moot.verifier")


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
    state: Tensor | None = None
    """What the target's output layer was given when it chose the last output token, [width], where that is kept."""
    guess_logits: Tensor | None = None
    """Of the session's guesses, [guesses, vocab], where some were fed."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The outcome of a session that cannot go on."""

    session: Session
    error: type[MootError]
    message: str


Outcome = Prefilled | Sampled | Broken


class DeviceLost(RuntimeError):
    """The accelerator's context is gone: nothing in this process can be computed any more."""


def broken(session: Session, error: Exception) -> Broken:
    if isinstance(error, RequestPoisoned):
        return Broken(session, RequestPoisoned, str(error))
    if is_out_of_memory(error):
        return Broken(session, OutOfMemory, "no memory for this request")
    # The text of an unknown error may quote what a user wrote: only its name leaves this process.
    _log.error("a request failed", exc_info=error, extra={"failed_request_id": session.request_id})
    return Broken(session, PeerError, f"internal error ({type(error).__name__})")


def is_device_lost(error: Exception) -> bool:
    """Whether the accelerator's context is gone: after all of its errors but a failed allocation, which leaves it as it
    was."""
    return isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error)


class Walks:
    """The walks of a step. With a `batch_sampler` all rows of a step are drawn at once, before the walks, and fetched
    in one piece. Without one, rows that need noise are drawn as the walks ask for them, so that those off the accepted
    path cost nothing; what is only looked up, highest and likeliest ids, is looked up in all rows of a step by one call
    each.

    Rows of a request's logits, [1 + fed nodes, vocab], are as `row_of_nodes` numbers them.
    """

    def __init__(
        self, sampler: Sampler, progress: Callable[[], None], batch_sampler: BatchSampler | None = None
    ) -> None:
        self._sampler = sampler
        self._progress = progress
        self._batch_sampler = batch_sampler
        self._drawn: dict[int, list[Drawn]] = {}
        """What was drawn at once in this step, by session: one entry per row of its logits."""
        self._highest: dict[int, list[int | None]] = {}
        self._likeliest: dict[int, list[tuple[int, ...]]] = {}
        """Likewise, what was looked up at once."""

    def draw(self, results: Sequence[tuple[Session, PendingWork, Tensor]]) -> None:
        """Begin a step whose walks are to go over these logits. Raises DeviceLost only.

        Nothing is known yet where that fails, whichever request's fault it is: the walks then do it row by row.
        """
        self._drawn, self._highest, self._likeliest = {}, {}, {}
        if not results:
            return
        try:
            if self._batch_sampler is None:
                self._look_up([(session, rows) for session, _, rows in results])
            else:
                self._draw_all(self._batch_sampler, results)
        except Exception as error:  # done row by row, it fails for the request that causes it
            if is_device_lost(error):
                raise DeviceLost(str(error)) from error
            _log.warning("rows are drawn one by one", exc_info=error)

    def _draw_all(self, sampler: BatchSampler, results: Sequence[tuple[Session, PendingWork, Tensor]]) -> None:
        specs = [_row_specs(session, work, self._sampler.vocab_size) for session, work, _ in results]
        logits = torch.cat([rows for _, _, rows in results])
        drawn = iter(sampler.draw(logits, [spec for own in specs for spec in own]))
        self._drawn = {
            session.arrival: [next(drawn) for _ in own] for (session, _, _), own in zip(results, specs, strict=True)
        }

    def _look_up(self, results: Sequence[tuple[Session, Tensor]]) -> None:
        vocab_size = self._sampler.vocab_size
        greedy = [
            (session, rows)
            for session, rows in results
            if not self._sampler.needs_row(session.params, session.num_output_tokens)
        ]
        if greedy:
            highest = iter(self._sampler.greedy_rows(joined([rows for _, rows in greedy])))
            self._highest = {session.arrival: [next(highest) for _ in rows] for session, rows in greedy}
        hinted = [(session, rows) for session, rows in results if session.num_top_candidates]
        if hinted:
            width = min(max(session.num_top_candidates for session, _ in hinted), vocab_size)
            ids = iter(likeliest(joined([rows for _, rows in hinted])[:, :vocab_size], width))
            self._likeliest = {
                session.arrival: [next(ids)[: session.num_top_candidates] for _ in rows] for session, rows in hinted
            }

    def forget(self, session: Session) -> None:
        """Forget what `draw` found for a session: its logits are others now."""
        for found in (self._drawn, self._highest, self._likeliest):
            found.pop(session.arrival, None)

    def walk(self, session: Session, work: PendingWork, logits: Tensor) -> tuple[Walk, list[int]]:
        """The walk through the draft, and the row that each output token was sampled from. Raises RequestPoisoned."""
        row_of = row_of_nodes(work)
        params, sampler = session.params, self._sampler
        known: list[int | None] | None = None
        if drawn := self._drawn.get(session.arrival):
            known = [one.token_id for one in drawn]
        elif highest := self._highest.get(session.arrival):
            known = highest
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

    def logprobs(
        self, session: Session, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int]
    ) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of `token_ids`, sampled from `rows`; empty where the request asks for none."""
        num_top = session.params.logprobs
        if num_top is None:
            return ()
        if drawn := self._drawn.get(session.arrival):
            return tuple(entry for row in rows if (entry := drawn[row].logprobs) is not None)
        pairs = zip(rows, token_ids, strict=True)
        return tuple(self._sampler.logprobs(logits[row], token_id, num_top) for row, token_id in pairs)

    def top_candidates(self, session: Session, logits: Tensor, rows: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """The likeliest ids of each of `rows`; empty where the request asks for none."""
        width = min(session.num_top_candidates, self._sampler.vocab_size)
        if not width or not rows:
            return ()
        if drawn := self._drawn.get(session.arrival):
            return tuple(drawn[row].candidates for row in rows)
        if ids := self._likeliest.get(session.arrival):
            return tuple(ids[row] for row in rows)
        return tuple(likeliest(logits[list(rows), : self._sampler.vocab_size], width))


def row_of_nodes(work: PendingWork) -> dict[int, int]:
    """Row of the logits by draft node: row 0 follows the prefix."""
    return {ROOT: 0} | {node: row for row, node in enumerate(work.fed_nodes, start=1)}


def _row_specs(session: Session, work: PendingWork, vocab_size: int) -> list[RowSpec]:
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
