"""The drafters inside this verifier: what they are asked after a step, and what becomes of one that fails."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import torch

from moot.core.types import Proposal
from moot.faults import act, fault
from moot.metrics import Metrics
from moot.proposers.inside import InsideAsk, InsideDrafter
from services.verifier.outcomes import DeviceLost, Outcome, Sampled, is_out_of_memory
from services.verifier.sessions import Session

_log = logging.getLogger("moot.verifier")


class InsideDrafters:
    """Not thread-safe: the compute thread owns it; `drafters` is replaced, never changed, and read from anywhere."""

    def __init__(self, drafters: Sequence[InsideDrafter], metrics: Metrics) -> None:
        self.drafters = tuple(drafters)
        self._metrics = metrics

    def propose(self, outcomes: Sequence[Outcome]) -> dict[int, tuple[Proposal, ...]]:
        """What follows what a step has committed, by the session's arrival. Raises DeviceLost only.

        One pass per drafter, for all sessions that want it; empty, and nothing computed, where none does.
        """
        found: dict[int, list[Proposal]] = defaultdict(list)
        asks = [(one.session, ask) for one in outcomes if isinstance(one, Sampled) and (ask := _ask_of(one))]
        for drafter in self.drafters if asks else ():
            wanting = [(session, ask) for session, ask in asks if drafter.drafter_id in session.inside_drafter_ids]
            if wanting:
                self._ask(drafter, wanting, found)
        return {arrival: tuple(proposals) for arrival, proposals in found.items()}

    def _ask(
        self, drafter: InsideDrafter, wanting: Sequence[tuple[Session, InsideAsk]], found: dict[int, list[Proposal]]
    ) -> None:
        name = drafter.drafter_id
        try:
            for session, _ in wanting:
                act(failing := fault("verifier.inside", session.request_id))
                if failing and failing.action == "raise":
                    raise RuntimeError("fault point verifier.inside")
            answers = drafter.propose([ask for _, ask in wanting])
            for (session, ask), chains in zip(wanting, answers, strict=True):
                own = [Proposal(name, chain.token_ids, chain.confidences) for chain in chains[: ask.width]]
                found[session.arrival] += own
        except torch.AcceleratorError as error:
            raise DeviceLost(str(error)) from error
        except Exception as error:  # noqa: BLE001 - a drafter's mistake ends the drafter, and no session
            if is_out_of_memory(error):
                _log.warning("no memory for a drafter in this step", extra={"drafter": name})
                self._metrics.proposals_dropped.labels(name, "memory").inc()
                return
            _log.exception("a drafter failed and is not asked again", extra={"drafter": name})
            self._metrics.proposals_dropped.labels(name, "failed").inc()
            self.drafters = tuple(one for one in self.drafters if one is not drafter)


def _ask_of(outcome: Sampled) -> InsideAsk | None:
    """None where nothing is wanted, or nothing that could be accepted: the last token is never drafted."""
    session = outcome.session
    num_tokens = min(session.num_inside_tokens, session.max_new - 1)
    if outcome.walk.finish is not None or outcome.state is None or not session.inside_drafter_ids:
        return None
    if num_tokens < 1 or session.inside_width < 1:
        return None
    return InsideAsk(
        session.token_ids, session.params, session.history, outcome.state, num_tokens, session.inside_width
    )
