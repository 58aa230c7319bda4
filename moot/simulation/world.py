"""A simulated installation: what it consists of, what happens to it, and what it delivers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from moot.core.options import Options, option, part
from moot.core.speculation.policy import PoolPolicy, SpeculationOptions, make_policy
from moot.core.voting.vote_policy import VotePolicy
from moot.simulation.events import Cores, Server, Timeline
from moot.simulation.free_requests import FreeRequest
from moot.simulation.free_verifiers import FreeVerifier
from moot.simulation.router_plan import Counts, RouterPlan
from moot.simulation.simulated_drafters import PoolPlan, SimulatedDrafterPool, SimulatedDraftSession
from moot.simulation.simulated_requests import Request
from moot.simulation.simulated_texts import Texts
from moot.simulation.simulated_verifiers import Verifier, VerifierPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Course(Options):
    """The course of a simulation: what happens when, in simulated seconds from the start. What is lost is lost for
    good."""

    warm_up_s: float = option(5.0, help="simulated seconds before counting", minimum=0)
    measure_s: float = option(10.0, help="simulated seconds counted", above=0)
    fail_at_s: float | None = option(None, help="simulated seconds after which parts are lost; none: never")
    failed_drafters: float = option(
        0.0, help="part of the drafter replicas that is lost then, 0 to 1", minimum=0, maximum=1
    )
    failed_verifiers: float = option(
        0.0, help="part of the verifiers that is lost then, 0 to below 1", minimum=0, below=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario(Course):
    """Sizes, costs and events. `concurrency`: requests per verifier that are always under way (a new one for each that
    ends). `num_cores`: all processes share so many; 0: each has its own."""

    verifier: VerifierPlan
    pools: tuple[PoolPlan, ...]
    router: RouterPlan = field(default_factory=RouterPlan)
    num_verifiers: int = 1
    num_routers: int = 1
    concurrency: int = 16
    num_cores: int = 0
    speculation: SpeculationOptions = part(SpeculationOptions)
    slice_s: float = 0.25
    num_requests: int | None = None
    """So many requests, then the end, whatever the times say; None: for ever."""


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """The outcome of a simulation. `tokens_per_s` of the installation; utilisations are parts of the time, drafters'
    without drafting ahead; `draft_ms`: from asking to the vote, mean of the rounds that drafted; `over_time`: (seconds,
    tokens/s) of each slice, warm-up included."""

    tokens_per_s: float
    tokens_per_round: float
    round_ms: float
    mean_length: float
    switches_per_1000_rounds: float
    router_utilisation: float
    verifier_utilisation: float
    drafter_utilisation: float
    rows_per_step: float
    requests_per_step: float
    draft_ms: float
    late_per_round: float
    from_ahead: float
    num_steps: int
    num_moves: int
    num_finished: int
    elapsed_s: float
    over_time: tuple[tuple[float, float], ...]
    lengths: dict[int, int]
    nodes_per_round: float = 0.0
    """Draft tokens verified."""


def make_pool_policy(scenario: Scenario) -> PoolPolicy:
    """The policy that a router of this scenario starts with."""
    return make_policy(
        scenario.speculation,
        families={plan.drafter_id: plan.family or plan.drafter_id for plan in scenario.pools},
    )


class World:
    """A simulated installation; `run` it once. `policies`: one per router, which go on from what they have learned;
    none: new ones."""

    def __init__(self, scenario: Scenario, texts: Texts, policies: Sequence[PoolPolicy] = ()) -> None:
        self.scenario = scenario
        self._texts = texts
        self._timeline = Timeline()
        self._cores = Cores(self._timeline, scenario.num_cores) if scenario.num_cores else None
        self._routers = [Server(self._timeline, self._cores) for _ in range(scenario.num_routers)]
        self._beside = [Server(self._timeline, self._cores) for _ in scenario.router.beside_s]
        self.policies = list(policies) or [make_pool_policy(scenario) for _ in self._routers]
        self._pools = [
            SimulatedDrafterPool(self._timeline, plan, number, self._cores)
            for number, plan in enumerate(scenario.pools)
        ]
        self._is_free = scenario.verifier.batching == "free"
        self._verifiers = [self._verifier(seed) for seed in range(scenario.num_verifiers)]
        self._vote_policies = [self._vote_policy(number) for number in range(len(self.policies))]
        self._running: list[dict[int, Any]] = [{} for _ in self._verifiers]
        self._counts = Counts({})
        self._num_started = 0
        self._next_router = 0
        self._last_end = 0.0

    def _verifier(self, seed: int) -> Any:
        scenario = self.scenario
        if not self._is_free:
            return Verifier(self._timeline, scenario.verifier, self._cores, seed)
        network_s = scenario.router.network_s
        return FreeVerifier(self._timeline, scenario.verifier, scenario.pools, network_s, self._cores, seed)

    def _vote_policy(self, router: int, number: int = 0) -> VotePolicy:
        return self.policies[router].vote_policy(number, [plan.drafter_id for plan in self.scenario.pools])

    def _renew_policies(self, number: int = 1) -> None:
        """Once a second, as routers send them."""
        # In place: requests hold the list.
        self._vote_policies[:] = [self._vote_policy(router, number) for router in range(len(self.policies))]
        self._timeline.after(1.0, partial(self._renew_policies, number + 1))

    def run(self, progress: Callable[[float], None] = lambda part: None) -> SimulatedOutcome:
        """`progress` is told the part of the simulated time that is over."""
        scenario, timeline = self.scenario, self._timeline
        for index in range(len(self._verifiers)):
            for place in range(scenario.concurrency):
                # Not all at once: requests that begin together stay together.
                timeline.after(1e-4 * place, partial(self._start, index))
        if self._is_free:
            self._renew_policies()
        end = scenario.warm_up_s + scenario.measure_s
        if scenario.fail_at_s is not None:
            timeline.after(scenario.fail_at_s, self._fail)
        over_time: list[tuple[float, float]] = []
        begin, base = 0.0, self._busy()
        number = 0
        while timeline.now < end and not self._is_over:
            number += 1
            before = self._counts.tokens
            timeline.run(min(number * scenario.slice_s, end))
            if timeline.now >= scenario.warm_up_s > begin:
                over_time.append((timeline.now, (self._counts.tokens - before) / scenario.slice_s))
                self._counts_reset()
                begin, base = timeline.now, self._busy()
            else:
                over_time.append((timeline.now, (self._counts.tokens - before) / scenario.slice_s))
            progress(timeline.now / end)
        elapsed = (self._last_end if self._is_over else timeline.now) - begin
        return self._outcome(elapsed, base, tuple(over_time))

    @property
    def _is_over(self) -> bool:
        most = self.scenario.num_requests
        return most is not None and self._num_started >= most and not any(self._running)

    def _counts_reset(self) -> None:
        # Requests hold the object, so that it is emptied rather than replaced.
        fresh = Counts({})
        for name in Counts.__slots__:
            setattr(self._counts, name, getattr(fresh, name))

    def _start(self, index: int) -> None:
        most = self.scenario.num_requests
        if most is not None and self._num_started >= most:
            return
        self._num_started += 1
        number = self._num_started
        router = self._next_router
        self._next_router = (router + 1) % len(self._routers)

        def ended() -> None:
            place = next(at for at in (index, *range(len(self._running))) if number in self._running[at])
            del self._running[place][number]
            self._last_end = self._timeline.now
            self._start(place)

        shared = (self._timeline, self.scenario.router, self._routers[router], self.policies[router])
        request: Any
        if self._is_free:
            now = partial(self._vote_policies.__getitem__, router)
            request = FreeRequest(*shared, now, self._pools, self._texts.next(), self._counts, ended)
        else:
            request = Request(*shared, self._pools, self._texts.next(), self._counts, ended, self._beside)
        self._running[index][number] = request
        request.start(self._verifiers[index])

    def _fail(self) -> None:
        scenario = self.scenario
        lost: set[SimulatedDraftSession] = set()
        for pool in self._pools:
            for replica in pool.replicas[: round(scenario.failed_drafters * len(pool.replicas))]:
                lost.update(replica.die())
        for running in self._running:
            for request in list(running.values()):
                request.lose_drafters(lost)
        num_lost = round(scenario.failed_verifiers * len(self._verifiers))
        for index in range(num_lost):
            self._verifiers[index].die()
            moving, self._running[index] = self._running[index], {}
            for count, (number, request) in enumerate(moving.items()):
                place = num_lost + (index + count) % (len(self._verifiers) - num_lost)
                self._running[place][number] = request
                request.move(self._verifiers[place])

    def _busy(self) -> tuple[float, float, float, int, int, int, int, int]:
        replicas = [replica for pool in self._pools for replica in pool.replicas]
        return (
            sum(router.busy_s for router in self._routers),
            sum(verifier.busy_s for verifier in self._verifiers),
            sum(replica.busy_s for replica in replicas),
            sum(verifier.num_steps for verifier in self._verifiers),
            sum(verifier.num_rows for verifier in self._verifiers),
            sum(verifier.num_verified for verifier in self._verifiers),
            sum(replica.num_asks for replica in replicas),
            sum(replica.num_from_ahead for replica in replicas),
        )

    def _outcome(
        self,
        elapsed: float,
        base: tuple[float, float, float, int, int, int, int, int],
        over_time: tuple[tuple[float, float], ...],
    ) -> SimulatedOutcome:
        counts = self._counts
        router, verifier, drafter = (now - then for now, then in zip(self._busy()[:3], base[:3], strict=True))
        steps, rows, verified, asks, ahead = (now - then for now, then in zip(self._busy()[3:], base[3:], strict=True))
        rounds = max(counts.rounds, 1)
        asked = max(sum(counts.lengths.values()), 1)
        replicas = sum(plan.replicas for plan in self.scenario.pools)
        return SimulatedOutcome(
            tokens_per_s=counts.tokens / elapsed,
            tokens_per_round=1 + counts.accepted / rounds,
            nodes_per_round=counts.drafted / rounds,
            round_ms=1e3 * counts.round_s / rounds,
            mean_length=sum(length * count for length, count in counts.lengths.items()) / asked,
            switches_per_1000_rounds=1e3 * counts.switches / rounds,
            router_utilisation=router / elapsed / len(self._routers),
            verifier_utilisation=verifier / elapsed / len(self._verifiers),
            drafter_utilisation=drafter / elapsed / max(replicas, 1),
            rows_per_step=rows / max(steps, 1),
            requests_per_step=verified / max(steps, 1),
            draft_ms=1e3 * counts.draft_s / max(asked - counts.lengths.get(0, 0), 1),
            late_per_round=counts.late / rounds,
            from_ahead=ahead / max(asks, 1),
            num_steps=steps,
            num_moves=counts.moves,
            num_finished=counts.finished,
            elapsed_s=elapsed,
            over_time=over_time,
            lengths=dict(sorted(counts.lengths.items())),
        )
