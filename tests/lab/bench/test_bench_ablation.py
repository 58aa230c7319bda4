"""The ablation's steps."""

from __future__ import annotations

from lab.bench.system.ablation import PLAIN, Config, rows, steps


def test_each_step_is_compared_with_one_that_is_measured() -> None:
    """Of the chosen steps each names one before it, or plain; plain is always there."""
    for config in (
        Config(),
        Config(neural="model"),
        Config(neural="model", steps=("tree", "stages")),
        Config(steps=("nothing of this name",)),
    ):
        names = []
        for one in steps(config):
            names.append(one.name)
            assert one.before in names
        assert names[0] == PLAIN
        assert len(set(names)) == len(names)
    assert len(steps(Config(steps=("tree",)))) == 2


def test_the_last_step_of_the_cheap_drafters_is_the_default() -> None:
    """The router is told nothing there: what the ablation ends with is what is served."""
    last = steps(Config())[-1]
    assert not any(last.differs.values())


def test_ratios_are_of_runs_of_one_turn() -> None:
    """A slow minute is in both parts of a ratio."""
    chosen = steps(Config(steps=("tree",)))

    def runs(*speeds: float) -> list[dict[str, float]]:
        return [{"tokens_per_s": speed, "tokens_per_round": 2.0, "drafted_per_round": 3.0} for speed in speeds]

    found = {"4": {"runs": {PLAIN: runs(10, 1, 20), "+ tree": runs(30, 3, 60)}, "differing": ["+ tree"]}}
    (_, tree) = rows(found, chosen)
    assert tree == ["4", "+ tree", "30.0", "3.00", "3.00", "2.00", "3.0", "NO"]
