"""Who votes: the drafters that requests may use, and what is known of each. One request's part of it: voters.py."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from moot.core.errors import InvalidRequest
from moot.core.policy import PoolPolicy
from moot.metrics import Metrics
from services.router.inside import InsideSource
from services.router.ports import DrafterSource, Prefix, known_ids
from services.router.voters import BallotPolicy, Voters

_log = logging.getLogger("moot.router.drafters")

DRAFTING_ROUNDS = 50
TRIED_IN = 4
"""Of so many requests one prepares drafters that are left out, so that they may be tried in it: reading every prompt
for nothing takes a machine's cores from the others."""


class Electorate:
    """All drafters of this router. `sources` may change while requests run; a request keeps those it started with."""

    def __init__(self, policy: PoolPolicy, ballots: BallotPolicy, metrics: Metrics) -> None:
        self.policy = policy
        self.ballots = ballots
        self.metrics = metrics
        self.sources: dict[str, DrafterSource] = {}
        self._left_out: dict[str, str] = {}
        self._num_panel_changes = 0
        self._available: frozenset[str] = frozenset()
        self.gone: frozenset[str] = frozenset()
        """Drafters in other processes that could be asked once and cannot now."""
        self._num_opened = 0
        self.is_shedding: Callable[[], bool] = lambda: False
        """Whether no round should draft: everything that is computed is needed for those who wait."""
        self.drafting_share = 1.0
        """Of late, the part of the rounds whose K is left to the policy that drafted; fading."""

    @property
    def drafter_ids(self) -> frozenset[str]:
        return frozenset(self.sources)

    def open(self, prefix: Prefix, names: tuple[str, ...] | None, num_speculative_tokens: int | None) -> Voters:
        """The drafters of one request. Raises InvalidRequest for a name that there is not."""
        if names is None:
            chosen = list(self.sources.values())
        else:
            unknown = sorted(set(names) - set(self.sources))
            if unknown:
                raise InvalidRequest(
                    f"no drafter {', '.join(unknown)}; there is {known_ids(self.sources.values())}", "drafters"
                )
            chosen = [self.sources[name] for name in dict.fromkeys(names)]
        chosen = [source for source in chosen if num_speculative_tokens != 0 and source.serves(prefix)]
        drafter_ids = [source.drafter_id for source in chosen]
        policy = self.policy.open(drafter_ids, num_speculative_tokens, is_chosen=names is not None)
        spared = frozenset[str]() if names is not None else self._spared(drafter_ids)
        return Voters(self, prefix, chosen, policy, num_speculative_tokens is None, spared)

    def _spared(self, drafter_ids: list[str]) -> frozenset[str]:
        """Those of the next request's drafters that are left out and not even tried in it."""
        left_out = self.policy.panel.left_out.keys() & drafter_ids
        if not left_out or len(left_out) == len(drafter_ids):
            return frozenset()
        self._num_opened += 1
        return frozenset() if self._num_opened % TRIED_IN == 0 else frozenset(left_out)

    def note_available(self, drafter_ids: Iterable[str]) -> None:
        """Drafters in other processes that can be asked now. Where one has gone, or is ejected, rounds wait for others:
        what drafting took with it would keep rounds from drafting without it."""
        before, self._available = self._available, frozenset(drafter_ids)
        self.gone = (self.gone | before) - self._available
        if before - self._available:
            self.policy.draft_cost.forget()

    def admit_inside(self, drafter_id: str, family: str) -> None:
        """A verifier has said that it holds this drafter. It stays known when that one goes: others may hold it."""
        if not isinstance(self.sources.get(drafter_id), InsideSource | None):
            _log.warning("drafter inside a verifier has the id of another", extra={"drafter": drafter_id})
            return
        self.policy.admit(drafter_id, family)
        # What is wished of it is wished before it is known whom the round asks.
        self.policy.panel.exempt.add(drafter_id)
        self.sources[drafter_id] = InsideSource(drafter_id, self.metrics)

    def note_round(self, has_drafted: bool) -> None:
        self.drafting_share += (has_drafted - self.drafting_share) / DRAFTING_ROUNDS

    def publish_panel(self) -> None:
        """Whom rounds do not ask any more, and why, where that has changed."""
        panel, gauge = self.policy.panel, self.metrics.drafters_left_out
        if panel.num_changes == self._num_panel_changes:
            return
        self._num_panel_changes = panel.num_changes
        before, self._left_out = self._left_out, dict(panel.left_out)
        for drafter_id, reason in before.items():
            if self._left_out.get(drafter_id) != reason:
                gauge.labels(drafter_id, reason).set(0)
        for drafter_id, reason in self._left_out.items():
            if before.get(drafter_id) != reason:
                gauge.labels(drafter_id, reason).set(1)
        _log.info(
            "panel changed", extra={"left_out": ", ".join(f"{one}: {why}" for one, why in self._left_out.items())}
        )

    def publish_weights(self) -> None:
        """The weights that the next request starts from."""
        for drafter_id, weight in self.policy.pool_weights.numbers.items():
            self.metrics.drafter_weight.labels(drafter_id).set(weight)
