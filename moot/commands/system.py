"""The whole system on this machine: which drafters, which processes, with which flags, in which order.

Kinds that look into the target run in the verifier, kinds without a model in the router, all others in processes of
their own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moot.client import ROUTER_PORT, Client, RequestFailed
from moot.commands import embedded_store
from moot.commands.common import DEMO_MODEL, run_folder
from moot.config import variable_of
from moot.core.errors import ConfigError, DeadlineExceeded
from moot.core.options import Options, flat_options, option, option_of
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.policy import SpeculationOptions
from moot.drafters.interface import DrafterEntry, parse_entries
from moot.drafters.registry import MODEL_FREE_KINDS, attached_kinds
from moot.model.compute import ComputeOptions
from moot.runtime.process import ServiceOptions
from moot.runtime.supervisor import Child, Say, Supervisor

AUTO = "auto"
DEMO_DRAFTER_SET = (
    "suffix:datastore=shipped@suffix-smollm2-135m",
    "prompt_lookup",
    "recycling",
    "ngram:table=shipped@ngram-smollm2-135m",
)
"""The best found for the demo's target on two cores (docs/performance.md). Its heads know what none of these knows, and
take a fifth of a round to say so: `heads:path=shipped@heads-smollm2-135m`."""
ANY_DRAFTER_SET = ("suffix", "prompt_lookup", "recycling")
"""For a target that no drafter here was trained for."""


@dataclass(frozen=True, slots=True)
class LocalDrafters:
    """`in_verifier`: kinds that look into the target; `in_router`: kinds without a model, whose work takes less than
    the way to another process and back (docs/decisions/0012-where-drafters-run.md); `processes`: the others."""

    in_verifier: tuple[DrafterEntry, ...]
    in_router: tuple[DrafterEntry, ...]
    processes: tuple[DrafterEntry, ...]

    @property
    def drafter_ids(self) -> tuple[str, ...]:
        return tuple(entry.drafter_id for entry in (*self.in_router, *self.processes, *self.in_verifier))


NO_STORE = "off"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class SystemConfig(Options):
    demo: bool = option(False, help="serve the demo's model, fetched the first time")
    model: str = option(DEMO_MODEL, help="target model: a local folder, a hub id, or the demo's model by its name")
    served_model_name: str | None = option(None, help="name that requests use (none: that of the model)")
    host: str = option_of(ServiceOptions, "host", help="address of the router's HTTP API")
    port: int = option(ROUTER_PORT, help="port of the router's HTTP API; 0 chooses a free one", minimum=0)
    drafters: tuple[str, ...] = option(
        (AUTO,),
        help="[id=]kind[:option=value]... each; auto: the best known for the model. Kinds that look into the target "
        "run in the verifier, kinds without a model in the router, others as processes",
    )
    drafter_processes: bool = option(False, help="every drafter as a process of its own, as its pods are on a cluster")
    vote: str = option_of(SpeculationOptions, "vote")
    shape: str = option_of(SpeculationOptions, "shape")
    weights: str = option_of(SpeculationOptions, "weights")
    length: str = option_of(SpeculationOptions, "length")
    asks: str = option_of(SpeculationOptions, "asks")
    proposal_width: int = option_of(CollectionPolicy, "width")
    api_key: tuple[str, ...] = option((), help="keys that callers of the API must show (none: every caller may)")
    redis_url: str | None = option(
        None, help="Redis 7 or Valkey server for the requests' records; none: one is started; 'off': no records"
    )
    device: str = option_of(ComputeOptions, "device")
    dtype: str = option_of(ComputeOptions, "dtype")
    num_threads: int = option_of(ComputeOptions, "num_threads", help="the verifier's compute threads; 0: one per core")
    start_timeout_s: float = option(300.0, help="seconds until every service must be ready")
    stop_grace_s: float = option(15.0, help="seconds from SIGTERM to SIGKILL when stopping")
    log_level: str = option_of(ServiceOptions, "log_level")

    def check_together(self) -> None:
        if self.demo and self.model != DEMO_MODEL:
            raise ConfigError("--demo serves the demo's model: give --demo or --model")


@dataclass(frozen=True, slots=True)
class System:
    """A running system. `url`: of the router's HTTP API; `client`: of it, with a key where one is needed; `drafters`:
    those that are processes of their own; `drafter_ids`: of all of them."""

    url: str
    client: Client
    supervisor: Supervisor
    router: Child
    drafters: tuple[Child, ...]
    verifier: Child
    logs: Path
    drafter_ids: tuple[str, ...]


@contextmanager
def running(config: SystemConfig, name: str, say: Say) -> Iterator[System]:
    """Start everything, wait until it serves, and end it on leaving. Raises MootError when a part does not start."""
    local_drafters = drafters_of(config)
    model = prepared_model(config.model, say)
    logs = run_folder(name)
    # What sets the command itself reaches a service as a flag, where it is meant for one.
    own_variables = [variable_of(leaf.name) for leaf in flat_options(type(config))]
    # Short: a Unix socket's path has little room.
    with (
        tempfile.TemporaryDirectory(prefix="moot-") as store_folder,
        Supervisor(logs, grace_s=config.stop_grace_s, say=say, own_variables=own_variables) as supervisor,
    ):
        say(f"starting the services (logs: {logs})")
        flags = _verifier_flags(config, model, local_drafters)
        verifier = supervisor.service("verifier", "verifier", flags, environ=_VERIFIER_ENV)
        drafters = tuple(
            supervisor.service(
                f"drafter-{entry.drafter_id}",
                "drafter",
                _drafter_flags(config, entry, model),
                environ=_LIGHT_ENV,
                essential=False,
            )
            for entry in local_drafters.processes
        )
        store_url = config.redis_url
        waiting = [verifier, *drafters]
        if store_url is None:
            folder = Path(store_folder)
            store_url = embedded_store.store_url(folder)
            waiting.append(
                supervisor.spawn(
                    "store",
                    embedded_store.store_argv(folder),
                    essential=False,
                    look=lambda: embedded_store.is_ready(folder),
                )
            )
        supervisor.wait_ready(waiting, config.start_timeout_s)
        flags = _router_flags(config, model, verifier, drafters, local_drafters, store_url)
        # Not as a flag: every user of this machine may read the flags of a process.
        keys = {variable_of("api_key"): ",".join(config.api_key)}
        router = supervisor.service("router", "router", flags, environ=_LIGHT_ENV | keys)
        supervisor.wait_ready([router], config.start_timeout_s)
        url = f"http://{config.host}:{router.port}"
        client = Client(url, next(iter(config.api_key), None))
        _wait_serving(client, supervisor, config.start_timeout_s)
        yield System(url, client, supervisor, router, drafters, verifier, logs, local_drafters.drafter_ids)


def _wait_serving(client: Client, supervisor: Supervisor, timeout_s: float) -> None:
    """Wait until requests are served: the router listens before it has met its verifier."""
    deadline = time.monotonic() + timeout_s
    while True:
        supervisor.check()
        try:
            client.get("/readyz")
            return
        except RequestFailed as error:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the router is not ready after {timeout_s:g} s") from error
        time.sleep(supervisor.POLL_S)


def prepared_model(model: str, say: Say) -> Path | str:
    """Folder of the demo's model; anything else is left to the services to find."""
    if model != DEMO_MODEL:
        return model
    from moot.shipped import cache_dir

    folder = cache_dir() / DEMO_MODEL
    if (folder / "config.json").is_file():
        return folder
    # Imports torch, which takes seconds: only when there is something to do.
    from moot.model.loading.prepare import prepare

    return prepare(model, progress=say)


# How the verifier's threads wait for each other is set by the verifier itself.
_VERIFIER_ENV = {"TOKENIZERS_PARALLELISM": "false"}
_LIGHT_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def drafters_of(config: SystemConfig) -> LocalDrafters:
    """Raises ConfigError naming --drafters and the bad entry."""
    drafters = config.drafters
    if drafters == (AUTO,):
        drafters = DEMO_DRAFTER_SET if config.model == DEMO_MODEL else ANY_DRAFTER_SET
    entries = parse_entries(drafters, "--drafters")
    known = attached_kinds()
    attached = tuple(entry for entry in entries if entry.kind in known)
    light = tuple(entry for entry in entries if entry.kind in MODEL_FREE_KINDS and not config.drafter_processes)
    return LocalDrafters(attached, light, tuple(entry for entry in entries if entry not in (*attached, *light)))


def _verifier_flags(config: SystemConfig, model: Path | str, local_drafters: LocalDrafters) -> list[str]:
    threads = config.num_threads or os.cpu_count() or 1
    return [
        *("--model", str(model), "--num-threads", str(threads)),
        *("--host", LOOPBACK, "--port", "0", "--metrics-port", "0"),
        *("--device", config.device, "--dtype", config.dtype, "--log-level", config.log_level),
        *("--drafters", ",".join(map(str, local_drafters.in_verifier))),
    ]


def _drafter_flags(config: SystemConfig, entry: DrafterEntry, model: Path | str) -> list[str]:
    options = [f"{name}={value}" for name, value in entry.options.items() if name != "model"]
    return [
        *("--kind", entry.kind, "--drafter-id", entry.drafter_id, "--tokenizer", str(model)),
        *(("--model", entry.options["model"]) if "model" in entry.options else ()),
        *(("--option", ",".join(options)) if options else ()),
        *("--host", LOOPBACK, "--port", "0", "--metrics-port", "0", "--log-level", config.log_level),
    ]


def _router_flags(
    config: SystemConfig,
    model: Path | str,
    verifier: Child,
    drafters: tuple[Child, ...],
    local_drafters: LocalDrafters,
    store_url: str,
) -> list[str]:
    name = config.served_model_name or Path(str(model)).name
    return [
        *("--model", str(model), "--served-model-name", name, "--host", config.host, "--port", str(config.port)),
        *("--grpc-port", "0", "--metrics-port", "0", "--verifiers", f"{LOOPBACK}:{verifier.port}"),
        *(
            "--drafters",
            ",".join(f"{child.name.removeprefix('drafter-')}={LOOPBACK}:{child.port}" for child in drafters),
        ),
        *("--in-process-drafters", ",".join(map(str, local_drafters.in_router))),
        *("--vote", config.vote, "--shape", config.shape, "--weights", config.weights, "--length", config.length),
        *("--asks", config.asks, "--proposal-width", str(config.proposal_width)),
        *("--redis-url", "none" if store_url == NO_STORE else store_url),
        *("--log-level", config.log_level),
    ]
