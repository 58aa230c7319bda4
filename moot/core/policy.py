"""What decides about speculation, bundled for all requests of a router: vote, shape, weights, tables, length.

`make_policy` makes the bundle of a router, with the tables that serve all its requests; `PoolPolicy.open` makes the
part that belongs to one request. A round reads: plan, (ask the drafters), vote, (verify, advance), learn. Nothing here
can change a text, only its speed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from moot.core.budget import Budget
from moot.core.calibration import Calibration, ShareAcceptance
from moot.core.cascade import ALWAYS_ASK
from moot.core.costs import DraftCost, RoundTimes, VerifyCost
from moot.core.errors import ConfigError
from moot.core.goodput import Goodput, PositionAcceptance
from moot.core.panel import ALL, PANELS, PAYING, Panel
from moot.core.registry import named
from moot.core.request_policy import RequestPolicy
from moot.core.shapes import SHAPES
from moot.core.speculation import (
    LENGTHS,
    Fixed,
    LengthPolicy,
    Load,
    Minions,
    Probes,
)
from moot.core.voting import POLICIES
from moot.core.weights import WEIGHTS, PoolWeights

_UNCALIBRATED_SCALE = 0.6
"""First guess of the acceptance of a token that all drafters agree on, where shares only count heads."""


@dataclass(slots=True)
class PoolPolicy:
    """The tables of one router. `vote`, `shape`, `weights`, `length` are names; see make_policy for the rest."""

    vote: str
    shape: str
    weights: str
    length: str
    num_speculative_tokens: int
    max_draft_tokens: int
    families: dict[str, str]
    calibration: Calibration
    acceptance: ShareAcceptance
    positions: PositionAcceptance
    probes: Probes = field(default_factory=Probes)
    pool_weights: PoolWeights = field(default_factory=PoolWeights)
    verify_cost: VerifyCost = field(default_factory=VerifyCost)
    draft_cost: DraftCost = field(default_factory=DraftCost)
    router_cost: DraftCost = field(default_factory=DraftCost)
    """What a round that drafts takes of the router's own time more than one that does not."""
    plain_seconds: float = 0.0
    """Of that time, what a round takes that does not; a running mean."""
    num_open: int = 0
    """Requests."""
    budgets: dict[str, Budget] = field(default_factory=dict)
    """Per verifier."""
    load: Load = field(default_factory=Load)
    """What the latest round has seen."""
    usual: RoundTimes | None = None
    cascade: float = ALWAYS_ASK
    """Part of K that the best proposal of cheap drafters must be expected to bring for dear ones not to be asked."""
    panel: Panel = field(default_factory=Panel)
    asks: str = PAYING
    """`paying`: as the panel says; `all`: every drafter in every round."""

    def open(
        self, drafter_ids: Sequence[str], num_speculative_tokens: int | None = None, *, is_chosen: bool = False
    ) -> RequestPolicy:
        """The policy of one request with this electorate.

        `num_speculative_tokens`: 0 for no drafting, n for always n (not above the pool's), None for the length policy.
        `is_chosen`: the request has named its drafters; then all of them are asked.
        """
        weights = WEIGHTS[self.weights](self.pool_weights.start(drafter_ids))
        length, most = self._length(num_speculative_tokens), self.num_speculative_tokens
        if num_speculative_tokens is not None:
            most = min(max(num_speculative_tokens, 0), most)
        panel = None if is_chosen or self.asks == ALL else self.panel
        self.num_open += 1
        return RequestPolicy(self, weights, length, most, num_speculative_tokens is None, panel)

    def _length(self, asked: int | None) -> LengthPolicy:
        most = self.num_speculative_tokens
        if asked is not None:
            return Fixed(min(max(asked, 0), most))
        if self.length == "goodput" and most > 0:
            costs = (self.verify_cost, self.draft_cost)
            return Goodput(most, *costs, self.positions, self.probes, router_cost=self.router_cost)
        if self.length == "minions" and most > 0:
            return Minions(min(4, most), most)
        return Fixed(most)

    def budget(self, verifier_id: str) -> Budget:
        """Of this verifier; those that no request shares are dropped."""
        found = self.budgets.get(verifier_id)
        if found is None:
            self.budgets = {one: budget for one, budget in self.budgets.items() if len(budget)}
            found = self.budgets[verifier_id] = Budget(self._step_seconds)
        return found

    def _step_seconds(self, num_tokens: int) -> float:
        return self.verify_cost.seconds(num_tokens)

    def admit(self, drafter_id: str, family: str = "") -> None:
        """A drafter has been found. Drafters of one `family` are alike; none: it is a family of its own."""
        if family:
            self.families[drafter_id] = family

    def forget(self, drafter_id: str) -> None:
        """A drafter is gone for good, or another model stands behind its name now: drop what was learned of it."""
        self.families.pop(drafter_id, None)
        self.calibration.forget(drafter_id)
        self.pool_weights.forget(drafter_id)
        self.panel.forget(drafter_id)


def make_policy(
    *,
    vote: str = "calibrated",
    shape: str = "tree",
    weights: str = "hedge",
    length: str = "goodput",
    num_speculative_tokens: int = 8,
    max_draft_tokens: int = 16,
    families: Mapping[str, str] | None = None,
    cascade: float = ALWAYS_ASK,
    asks: str = PAYING,
    priors: Mapping[str, float] | None = None,
) -> PoolPolicy:
    """A bundle from names. Raises ConfigError for an unknown name, with the known ones, and for limits out of range.

    `num_speculative_tokens`: the greatest K; `max_draft_tokens`: nodes in one draft; `families`: drafter id to family;
    `cascade`, `asks`: see PoolPolicy; `priors`: drafter id to the weight it starts with, 1 for all others.
    """
    named("vote", vote, POLICIES)
    named("shape", shape, SHAPES)
    named("weights", weights, WEIGHTS)
    named("length", length, dict.fromkeys(LENGTHS))
    named("asks", asks, dict.fromkeys(PANELS))
    if num_speculative_tokens < 0 or max_draft_tokens < 0:
        raise ConfigError("num_speculative_tokens and max_draft_tokens must not be negative")
    if not 0.0 <= cascade <= ALWAYS_ASK:
        raise ConfigError("cascade must be 0 to 1")
    return PoolPolicy(
        vote=vote,
        shape=shape,
        weights=weights,
        length=length,
        num_speculative_tokens=num_speculative_tokens,
        max_draft_tokens=max_draft_tokens,
        families=dict(families or {}),
        calibration=Calibration(),
        acceptance=ShareAcceptance(1.0 if vote == "calibrated" else _UNCALIBRATED_SCALE),
        positions=PositionAcceptance(num_speculative_tokens, decay=0.995),
        cascade=cascade,
        asks=asks,
        pool_weights=PoolWeights(priors=priors),
    )
