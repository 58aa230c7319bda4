"""C32 in virtual time, where costs are exact: the policy against every fixed K."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.bench.virtual.length_sweep import MACHINES, simulate, sweep, switches

CASES = [(machine, concurrency, 0.3) for machine in MACHINES for concurrency in (1, 4)]
CASES += [("CPU, free writing", 16, 0.3), ("GPU, neural drafters", 16, 0.3), ("GPU, neural drafters", 64, 0.3)]


@pytest.mark.parametrize(("machine", "concurrency", "noise"), CASES)
def test_the_policy_finds_the_best_length(machine: str, concurrency: int, noise: float) -> None:
    """Within 5 % of the best fixed K and of no drafting at every load, also where durations are 30 % off; hardly a
    draft where drafting does not pay at saturation; K moves seldom."""
    found = sweep(machine, concurrency, noise, rounds=1000, lengths=(0, 1, 3, 5, 8))
    assert found.of(found.best).median >= 0.95
    assert found.of(0).median >= 0.95
    assert switches(found) <= 80
    if found.best == 0:
        (policy,) = found.policy
        assert policy.lengths.get(0, 0) >= 0.85 * sum(policy.lengths.values())
        assert policy.tokens_per_round < 1.05


SATURATED = MACHINES["CPU, text that repeats itself"]


@pytest.mark.parametrize("batching", ["ready", "gathered"])
def test_nothing_is_drafted_at_saturation(batching: str) -> None:
    """C32 where drafts would be accepted, steps are 30 % off, and every token costs its time: the vote sends nothing
    there, so that a request which went on asking for drafts would ask for ever. Where steps gather, the verifier rests
    while the router turns, which a draft may use: there it must only be no slower than without."""
    costs = replace(SATURATED, batching=batching)
    off, policy = (simulate(costs, 64, 0.3, 1000, length) for length in (0, None))
    assert policy.tokens_per_s >= 0.95 * off.tokens_per_s
    assert policy.tokens_per_round < 1.05
    if batching == "ready":
        assert off.verifier_utilisation > 0.99
        assert policy.lengths.get(0, 0) >= 0.95 * sum(policy.lengths.values())
    else:
        assert off.verifier_utilisation < 0.95
