"""The whole system under mutual TLS: the right texts, and certificates that change under ten streams."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moot.rpc.identity import Identity
from moot.testing.made_certificates import Authority, PodFiles, shown_serial_number
from moot.testing.tiny_model import make_tiny_model
from tests.integration.asking import Reply
from tests.integration.faulty import STEP_DELAY, Rig, body
from tests.integration.processes import START_TIMEOUT_S, Process, at_least, wait_metric
from tests.integration.whole_system import System, base_flags, running
from tests.waiting import until

NUM_STREAMS = 10
ROUTER = Identity("prod", "demo", "router")
ROLES = ("router", "verifier", "drafter")
PROXIED = ("verifier-0", "drafter-suffix")
EXPIRY = "moot_certificate_expiry_timestamp_seconds"


class Secured(Rig):
    """A system whose pods have certificates in `files`, by role."""

    def __init__(self, system: System, files: dict[str, PodFiles], authority: Authority) -> None:
        super().__init__(system)
        self.files = files
        self.authority = authority
        self.last_ends = 20.0

    @property
    def ends_told(self) -> list[float]:
        return [process.metric(EXPIRY, certificate="own") for process in self.system.processes]

    def issue(self, signer: Authority, *trusted: Authority) -> dict[str, int]:
        """New certificates for all roles; returns, when every process uses its own, their serial numbers."""
        self.last_ends += 1.0
        before, serial_numbers = self.ends_told, {}
        for role, files in self.files.items():
            leaf = signer.issue(ROUTER.peer(role), ends=self.last_ends)
            files.write(leaf, *trusted)
            serial_numbers[role] = leaf.serial_number
        until(
            lambda: all(now > then for now, then in zip(self.ends_told, before, strict=True)),
            "every process tells when its new certificate ends",
            30,
        )
        return serial_numbers

    def reconnect(self) -> None:
        """Every connection is cut; the router makes new ones."""
        since = len(self.system.router.log)
        for proxy in self.system.proxies.values():
            proxy.reset()
        until(lambda: self._num_ready(since) >= len(PROXIED), "every peer is ready again")
        self.system.wait_for_peers()

    def _num_ready(self, since: int) -> int:
        """How often a peer has become ready for the router, as its log says from there on."""
        return self.system.router.log[since:].count('"state": "ready"')

    def ask_long(self, index: int) -> Reply:
        return self.ask_right(index, max_tokens=60)

    @contextmanager
    def streams(self) -> Iterator[None]:
        """Ten streams at every moment, again and again, each of them right."""
        done = threading.Event()

        def keep_asking(index: int) -> None:
            self.ask_long(index)
            while not done.is_set():
                self.ask_long(index)

        with ThreadPoolExecutor(NUM_STREAMS) as pool:
            running_streams = [pool.submit(keep_asking, index) for index in range(NUM_STREAMS)]
            try:
                wait_metric(self.system.router, "moot_num_requests_running", at_least(NUM_STREAMS))
                yield
            finally:
                done.set()
            for stream in running_streams:
                stream.result(60)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority()
    files = {role: PodFiles(folder / role).write(authority.issue(ROUTER.peer(role)), authority) for role in ROLES}
    with running(
        folder / "logs",
        make_tiny_model(folder / "tiny"),
        drafters=("suffix",),
        proxied=PROXIED,
        faults={"verifier-0": STEP_DELAY},
        verifier_flags=files["verifier"].flags,
        drafter_flags=files["drafter"].flags,
        router_flags=(*files["router"].flags, "--asks", "all"),
    ) as system:
        made = Secured(system, files, authority)
        made.all_expected([body(index, max_tokens=60) for index in range(NUM_STREAMS)])
        yield made


def test_texts_are_right(rig: Secured) -> None:
    """Router, verifier and drafter prove who they are to each other; the drafter drafts, and no token changes."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        replies = list(pool.map(rig.ask_long, range(NUM_STREAMS)))
    assert any(reply.proposed.get("suffix") for reply in replies)


def test_certificates_and_authorities_change_under_ten_streams(rig: Secured) -> None:
    """Over a bundle of both: no stream notices. At the end only the new one counts, and all connect by it."""
    old, new = rig.authority, Authority("new")
    with rig.streams():
        rig.issue(old, old, new)
        rig.issue(new, old, new)
        serial_numbers = rig.issue(new, new)
        rig.authority = new
    # The router's first certificates are worth nothing any more: it must come with its new one.
    with rig.streams():
        rig.reconnect()
    for process in (*rig.system.verifiers, *rig.system.drafters.values()):
        shown = shown_serial_number(process.address, ROUTER.peer(process.role), rig.files["router"])
        assert shown == serial_numbers[process.role]


def test_a_router_that_is_refused_says_why(rig: Secured, tmp_path: Path) -> None:
    """In plain text, or with another authority's certificate: never ready, and its log says what keeps it out."""
    stranger = Authority("stranger")
    files = PodFiles(tmp_path / "pod").write(stranger.issue(ROUTER), rig.authority, stranger)
    expected = {
        "plain": ((), "it closed the connection before it answered; it may want TLS"),
        "stranger": (files.flags, "it may refuse this side's certificate: its log says why"),
    }
    base = base_flags(rig.system.model, rig.system.verifiers[0].address, "")
    routers = {
        name: Process(rig.system.supervisor, f"router-{name}", "router", (*base, *flags))
        for name, (flags, _) in expected.items()
    }
    rig.system.supervisor.wait_ready([router.child for router in routers.values()], START_TIMEOUT_S)
    for name, (_, reason) in expected.items():
        router = routers[name]
        until(lambda router=router, reason=reason: reason in router.log, f"router {name} says why")
        assert router.metric("moot_peers", role="verifier", state="ready") == 0
        router.kill()
    assert "Handshake failed" in rig.system.verifiers[0].log
    rig.ask_long(2)


def test_a_process_with_wrong_files_does_not_start(tmp_path: Path) -> None:
    """One sentence that names the flag, before anything is loaded; exit status 2."""
    ours = Authority()
    expired = PodFiles(tmp_path / "expired").write(ours.issue(ROUTER, starts=-3, ends=-1), ours)
    drafter = PodFiles(tmp_path / "drafter").write(ours.issue(ROUTER), ours)
    cases = {
        "router": (("--verifiers", "127.0.0.1:1", *expired.flags), "--tls-cert-file: the certificate with serial"),
        "drafter": (("--kind", "suffix", *drafter.flags), "--tls-cert-file: the certificate is of a router"),
        "verifier": (expired.flags[:4], "--tls-ca-file: the three --tls-*-file flags go together"),
    }
    started = {
        role: subprocess.Popen(
            [sys.executable, "-m", f"services.{role}", "--model", str(tmp_path / "none"), *flags],
            stderr=subprocess.PIPE,
            text=True,
        )
        for role, (flags, _) in cases.items()
    }
    for role, process in started.items():
        _, said = process.communicate(timeout=START_TIMEOUT_S)
        assert process.returncode == 2, said
        assert said.splitlines()[-1].startswith(f"error: {cases[role][1]}"), said
