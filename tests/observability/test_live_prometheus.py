"""A real Prometheus before the real services under a little load: every expression that is shipped has an answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.integration.asking import Ask, complete
from tests.integration.looping_model import make_looping_model
from tests.integration.processes import get
from tests.integration.whole_system import System, running
from tests.observability.needed_tools import module
from tests.observability.prometheus_process import Prometheus
from tests.observability.shown_expressions import of_dashboards, of_rules
from tests.waiting import until

promql = module("promql_parser", "promql-parser")

MAY_BE_EMPTY = {
    "moot_certificate_expiry_timestamp_seconds": "pods talk in plain text here",
    "moot_drafters_left_out": "every drafter is worth asking here, or none was judged yet",
    "moot_answers_dropped_total": "no answer came for a session that was over",
    "absent": "what is looked for is there",
}
"""A metric or function, and why an expression about it says nothing in a healthy system of this kind."""

_COMPARISONS = ("==", "!=", ">", "<", ">=", "<=")
_LOADERS = 3


@dataclass
class Watched:
    system: System
    prometheus: Prometheus
    tokens_delivered: int = 0
    """By the requests that have ended."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def load(self) -> Iterator[None]:
        """A few callers who ask one thing after the other, until this ends."""
        over = threading.Event()
        callers = [threading.Thread(target=self._ask_on, args=(over, index)) for index in range(_LOADERS)]
        for caller in callers:
            caller.start()
        try:
            yield
        finally:
            over.set()
            for caller in callers:
                caller.join()

    def _ask_on(self, over: threading.Event, index: int) -> None:
        turn = 0
        while not over.is_set():
            turn += 1
            body: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "ignore_eos": True, "temperature": turn % 2}
            chat = turn % 3 == 0
            asked = (
                {"messages": [{"role": "user", "content": "12345"}]} if chat else {"prompt": f"{index} ha ha {turn}"}
            )
            answer = complete(self.system.router.port, body | asked, chat=chat)
            with self._lock:
                self.tokens_delivered += answer.usage["completion_tokens"]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A verifier, two good drafters and one that talks garbage, a store, and a Prometheus."""
    folder = tmp_path_factory.mktemp("watched")
    with running(
        folder / "logs",
        make_looping_model(folder / "model"),
        drafters={"suffix": "suffix", "lookup": "prompt_lookup", "garbage": "prompt_lookup"},
        store=True,
        faults={"drafter-garbage": "drafter.propose=garbage"},
        router_flags=(
            *("--asks", "all", "--vote-soft-deadline-ms", "1000", "--vote-hard-deadline-ms", "1000"),
            *("--drafter-warm-up-s", "0.5", "--eject-s", "0.5"),
        ),
    ) as system:
        ports = {
            "router": [system.router.metrics_port],
            "verifier": [process.metrics_port for process in system.verifiers],
            "drafter": [process.metrics_port for process in system.drafters.values()],
        }
        prometheus = Prometheus(system.supervisor, folder / "prometheus", ports)
        until(lambda: prometheus.value("sum(up)") == 5, "everything is scraped")
        yield Watched(system, prometheus)


def test_every_expression_has_an_answer(watched: Watched) -> None:
    """Panels, recording rules and both sides of every alert's comparison: none in error, none empty, none without a
    number. An alert as a whole is empty as long as all is well."""
    prometheus = watched.prometheus
    questions = [(shown.where, part) for shown in [*of_dashboards(), *of_rules()] for part in _parts(shown.expression)]
    assert len(questions) > 120
    with watched.load():
        until(lambda: (prometheus.value("sum(rate(moot_rounds_total[30s]))") or 0) > 0, "rounds are seen")
        until(lambda: prometheus.numbers("moot:drafter_acceptance:ratio_rate10m"), "rules are evaluated")
        until(lambda: (prometheus.value("sum(moot_drafter_ejections_total)") or 0) > 0, "one is ejected")

        silent = questions

        def unexpected() -> list[tuple[str, str]]:
            nonlocal silent
            silent = [question for question in silent if not prometheus.numbers(question[1])]
            return [question for question in silent if not any(name in question[1] for name in MAY_BE_EMPTY)]

        # A series that began a moment ago has no rate yet.
        until(lambda: not unexpected(), "an answer to every expression", poll_s=0.5)
    # Those that are always empty here show that the others were looked at.
    names = {name for name in MAY_BE_EMPTY for _, expression in silent if name in expression}
    assert names >= {"moot_certificate_expiry_timestamp_seconds", "absent"}
    assert prometheus.rule_errors() == {}


def test_what_prometheus_sums_up_is_what_callers_got(watched: Watched) -> None:
    """C30: counters are exact, through HTTP, rounds and scrape: tokens, positions and rounds fit together; nobody's
    number is no number."""
    with watched.load():
        until(lambda: watched.tokens_delivered > 100, "tokens were delivered")
    router, prometheus = watched.system.router, watched.prometheus
    watched.system.assert_idle()
    delivered = router.metric("moot_generation_tokens_total")
    assert delivered == watched.tokens_delivered
    until(lambda: prometheus.value("sum(moot_generation_tokens_total)") == delivered, "the last scrape")
    accepted = router.metric("moot_accepted_tokens_total")
    assert accepted == router.metric("moot_accepted_tokens_per_position_total")
    assert 0 < accepted <= router.metric("moot_draft_tokens_total")
    # Every round brings one token of the target's own, and so does every opening; the last round may be cut short.
    rounds, requests = router.metric("moot_rounds_total"), router.metric("moot_requests_total")
    assert accepted + rounds <= delivered <= accepted + rounds + requests
    spent = router.metric("moot_round_duration_seconds_sum")
    assert 0 < router.metric("moot_plain_decoding_seconds_total") <= (1 + 8) * spent
    for process in watched.system.processes:
        for sample in _samples(process.metrics_port):
            assert sample.value == sample.value, sample


def test_what_is_refused_is_counted_by_its_status(watched: Watched) -> None:
    """Before anything is generated; each once; with the status that the caller saw."""
    router = watched.system.router
    bodies = {400: {"model": "tiny", "prompt": "x", "max_tokens": -1}, 404: {"model": "other", "prompt": "x"}}
    for status, body in bodies.items():
        before = router.metric("moot_requests_refused_total", code=str(status))
        ended = router.metric("moot_requests_total")
        assert Ask(router.port, body).result().status == status
        assert router.metric("moot_requests_refused_total", code=str(status)) == before + 1
        assert router.metric("moot_requests_total") == ended


def test_lost_drafters_and_a_lost_store_raise_their_alerts_and_nothing_else(watched: Watched) -> None:
    """All is well, then both are gone, then both are back: the alerts come and go with them, and requests are served
    all the while."""
    system, prometheus = watched.system, watched.prometheus
    # The drafter that talks garbage is there to be ejected; how fast this machine is says nothing here.
    expected = {
        "MootDrafterFlapping",
        "MootSpeculationHarmful",
        "MootTimeToFirstTokenHigh",
        "MootInterTokenLatencyHigh",
        # Without its `for:` it fires whenever a scrape falls between a request's end and its cache's.
        "MootKvCacheLeak",
    }
    wanted = {"MootAllDraftersLost", "MootStoreDown"}
    assert system.store is not None
    with watched.load():
        until(lambda: prometheus.firing() <= expected, "all is well")
        for drafter in system.drafters.values():
            drafter.kill()
        system.store.kill()
        until(lambda: wanted <= prometheus.firing(), "both alerts fire")
        assert prometheus.firing() <= wanted | expected
        system.heal()
        until(lambda: not wanted & prometheus.firing(), "both alerts are over")


def _parts(expression: str) -> list[str]:
    """The expression, or what it compares: an alert's condition holds only when something is wrong."""
    tree = promql.parse(expression)
    return [str(part.prettify()) for part in _compared(tree)] if _compares(tree) else [expression]


def _compares(tree: Any) -> bool:
    match tree:
        case promql.BinaryExpr():
            return str(tree.op) in (*_COMPARISONS, "and", "or", "unless")
        case promql.ParenExpr():
            return _compares(tree.expr)
    return False


def _compared(tree: Any) -> list[Any]:
    if not _compares(tree):
        return [] if isinstance(tree, promql.NumberLiteral) else [tree]
    if isinstance(tree, promql.ParenExpr):
        return _compared(tree.expr)
    return [*_compared(tree.lhs), *_compared(tree.rhs)]


def _samples(port: int) -> list[Any]:
    text = get(port, "/metrics").text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
