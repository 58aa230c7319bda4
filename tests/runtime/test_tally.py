"""Tallies say what the library's own histogram says of the same values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from moot.runtime.metrics import TallyFamily

BOUNDS = (0.0005, 0.1, 1, 2.5, 60)
values_of = st.lists(st.tuples(st.sampled_from([*BOUNDS, 0.0, 0.3, 1.5, 99.0]), st.integers(1, 5)), max_size=20)


def shown(registry: CollectorRegistry) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(values_of)
def test_a_tally_shows_what_a_histogram_shows(values: list[tuple[float, int]]) -> None:
    """The same buckets, names, sums and counts in the exposition, also where many values are counted at once."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = TallyFamily("some_seconds", "Some.", ["stage"], BOUNDS, ours).labels("one")
    histogram = Histogram("some_seconds", "Some.", ["stage"], buckets=BOUNDS, registry=theirs).labels("one")
    for value, count in values:
        tally.observe(value, count)
        for _ in range(count):
            histogram.observe(value)
    assert shown(ours) == pytest.approx(shown(theirs))


def test_without_labels_there_is_one_from_the_start() -> None:
    """A metric without labels shows zeros before its first value; one with labels shows nothing."""
    plain, labelled = CollectorRegistry(), CollectorRegistry()
    family = TallyFamily("some_seconds", "Some.", [], BOUNDS, plain)
    labelled_family = TallyFamily("some_seconds", "Some.", ["stage"], BOUNDS, labelled)
    assert shown(plain)["some_seconds_count", frozenset()] == 0
    assert shown(labelled) == {}
    assert family.labels() is family.labels()
    with pytest.raises(ValueError, match="stage"):
        labelled_family.labels()
