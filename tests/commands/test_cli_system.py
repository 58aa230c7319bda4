"""What the commands start: flags that the services know, a store that is bounded, folders that do not pile up."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from redis import Redis

from moot.commands import common, embedded_store
from moot.commands.drafters import drafter_rows
from moot.commands.system import SystemConfig, _router_flags, drafters_of
from moot.config import load_config
from moot.core.errors import ConfigError
from moot.core.options import make_config
from moot.runtime.metrics import Metrics
from moot.runtime.supervisor import Supervisor
from services.router.config import RouterConfig


def test_the_embedded_store_is_private_and_bounded(tmp_path: Path) -> None:
    """No port is opened, memory has a limit, and nothing is evicted to make room."""
    with tempfile.TemporaryDirectory(prefix="moot-") as name, Supervisor(tmp_path) as supervisor:
        folder = Path(name)
        assert embedded_store.is_ready(folder) is None
        argv = embedded_store.store_argv(folder)
        store = supervisor.spawn("store", argv, look=lambda: embedded_store.is_ready(folder))
        supervisor.wait_ready([store], 20)
        client = Redis.from_url(embedded_store.store_url(folder))
        settings = client.config_get("port", "maxmemory", "maxmemory-policy", "appendonly", "unixsocketperm")
        client.close()
    assert settings == {
        "port": "0",
        "maxmemory": str(256 * 1024 * 1024),
        "maxmemory-policy": "noeviction",
        "appendonly": "yes",
        "unixsocketperm": "700",
    }


def test_a_socket_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    """The server would cut it off or refuse it with a riddle."""
    with pytest.raises(ConfigError, match="too long for a Unix socket"):
        embedded_store.store_argv(tmp_path / ("x" * 100))


def test_log_folders_of_earlier_runs_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few are kept to look at; those of running processes are never touched."""
    monkeypatch.setenv("MOOT_CACHE", str(tmp_path))
    runs = tmp_path / "run"
    # Process ids above the system's limit belong to nobody; 1 is always alive.
    for name in ("serve-1", *(f"demo-{99_999_990 + index}" for index in range(9))):
        (runs / name).mkdir(parents=True)
    made = common.run_folder("demo")
    left = {path.name for path in runs.iterdir()}
    assert {"serve-1", made.name} <= left
    assert len(left) <= common.KEPT_RUNS + 2


def test_drafter_counts_are_read_from_the_metrics_page() -> None:
    """The names on the page are those that the router exports."""
    metrics = Metrics()
    metrics.proposal_tokens.labels("suffix").inc(9)
    metrics.votes_won.labels("suffix").inc(2)
    metrics.drafter_weight.labels("ngram").set(0.25)
    assert drafter_rows(metrics.exposition().decode()) == [
        ["ngram", "-", "-", "-", "0.25"],
        ["suffix", "9", "-", "2", "-"],
    ]


def test_a_table_is_aligned() -> None:
    """Names to the left, numbers to the right."""
    assert common.table(["name", "n"], [["a", "10"], ["longer", "9"]]).splitlines() == [
        "name     n",
        "------  --",
        "a       10",
        "longer   9",
    ]


def test_a_served_system_votes_as_its_flags_say() -> None:
    """The router of `moot serve` gets vote, shape, weights, length and whom to ask as asked for, by flags that it
    knows."""
    wanted = {"vote": "majority", "shape": "siblings", "weights": "minions", "length": "fixed", "asks": "all"}
    config = make_config(SystemConfig, drafters=("suffix",), **wanted)
    flags = _router_flags(config, "model", SimpleNamespace(port=7100), (), drafters_of(config), "none")
    router = load_config(RouterConfig, flags, prog="router")
    assert {name: getattr(router.speculation, name) for name in wanted} == wanted
