"""The whole system on this machine: which processes, with which flags, in which order."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from moot import embedded_store
from moot.client import Client, RequestFailed
from moot.commands.common import run_folder
from moot.config import option, variable_of
from moot.core.errors import ConfigError, DeadlineExceeded
from moot.proposers.registry import MODEL_FREE_KINDS
from moot.supervisor import Child, Say, Supervisor

DEMO_MODEL = "smollm2-135m-instruct"
NO_STORE = "off"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class SystemConfig:
    demo: bool = option(False, help="serve the demo's model, fetched the first time")
    model: str = option(DEMO_MODEL, help="target model: a local folder, a hub id, or the demo's model by its name")
    served_model_name: str | None = option(None, help="name that requests use (none: that of the model)")
    host: str = option("127.0.0.1", help="address of the router's HTTP API")
    port: int = option(8000, help="port of the router's HTTP API; 0 chooses a free one")
    drafters: tuple[str, ...] = option(
        ("suffix", "prompt_lookup", "recycling"),
        help="drafter kinds; repeat a kind as kind:name. Those without a model run in the router, others as processes",
    )
    inside_drafters: tuple[str, ...] = option(
        (), help="drafters inside the verifier, which propose with each answer: [id=]kind[:option=value]... each"
    )
    drafter_processes: bool = option(False, help="every drafter as a process of its own, as its pods are on a cluster")
    api_key: tuple[str, ...] = option((), help="keys that callers of the API must show (none: everybody may call)")
    redis_url: str | None = option(
        None, help="Redis 7 or Valkey server for the requests' records; none: one is started; 'off': no records"
    )
    device: str = option("auto", help="where the target model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", help="number format", choices=("auto", "bfloat16", "float16", "float32", "float64"))
    num_threads: int = option(0, help="the verifier's compute threads; 0: one per core")
    start_timeout_s: float = option(300.0, help="seconds until every service must be ready")
    stop_grace_s: float = option(15.0, help="seconds from SIGTERM to SIGKILL when stopping")
    log_level: str = option("info", help="least level logged", choices=("debug", "info", "warning", "error"))

    def __post_init__(self) -> None:
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
    model = prepared_model(config.model, say)
    logs = run_folder(name)
    # Short: a Unix socket's path has little room.
    with (
        tempfile.TemporaryDirectory(prefix="moot-") as store_folder,
        Supervisor(logs, grace_s=config.stop_grace_s, say=say, own_variables=_variables(type(config))) as supervisor,
    ):
        say(f"starting the services (logs: {logs})")
        verifier = supervisor.service("verifier", "verifier", _verifier_flags(config, model), environ=_VERIFIER_ENV)
        drafters = tuple(
            supervisor.service(
                f"drafter-{drafter_id}",
                "drafter",
                _drafter_flags(config, kind, drafter_id, model),
                environ=_LIGHT_ENV,
                essential=False,
            )
            for kind, drafter_id in _drafter_ids(config.drafters)
            if not _is_inside(config, kind)
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
        flags = _router_flags(config, model, verifier, drafters, store_url)
        # Not as a flag: every user of this machine may read the flags of a process.
        keys = {variable_of("api_key"): ",".join(config.api_key)}
        router = supervisor.service("router", "router", flags, environ=_LIGHT_ENV | keys)
        supervisor.wait_ready([router], config.start_timeout_s)
        url = f"http://{config.host}:{router.port}"
        client = Client(url, next(iter(config.api_key), None))
        _wait_serving(client, supervisor, config.start_timeout_s)
        drafter_ids = tuple(drafter_id for _, drafter_id in _drafter_ids(config.drafters))
        yield System(url, client, supervisor, router, drafters, verifier, logs, drafter_ids)


def _variables(config: type[SystemConfig]) -> list[str]:
    """What sets the command itself. It reaches a service as a flag, where it is meant for one."""
    return [variable_of(field.name) for field in fields(config)]


def _wait_serving(client: Client, supervisor: Supervisor, timeout_s: float) -> None:
    """The router listens before it has met its verifier."""
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
    from moot.commands.common import cache_folder

    folder = cache_folder() / DEMO_MODEL
    if (folder / "config.json").is_file():
        return folder
    # Imports torch, which takes seconds: only when there is something to do.
    from moot.model.prepare import prepare

    return prepare(model, progress=say)


# How the verifier's threads wait for each other is set by the verifier itself.
_VERIFIER_ENV = {"TOKENIZERS_PARALLELISM": "false"}
_LIGHT_ENV = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def _drafter_ids(drafters: tuple[str, ...]) -> list[tuple[str, str]]:
    """(kind, drafter id) of each; the id is the kind unless given as kind:id."""
    pairs = [(kind, drafter_id or kind) for kind, _, drafter_id in (entry.partition(":") for entry in drafters)]
    if len({drafter_id for _, drafter_id in pairs}) < len(pairs):
        raise ConfigError("--drafters names one drafter twice: give the second as kind:name")
    return pairs


def _is_inside(config: SystemConfig, kind: str) -> bool:
    """Whether drafters of this kind run in the router's process. What they do takes microseconds, and asking another
    process takes a millisecond or two (docs/decisions/0012-where-drafters-run.md)."""
    return kind in MODEL_FREE_KINDS and not config.drafter_processes


def _verifier_flags(config: SystemConfig, model: Path | str) -> list[str]:
    threads = config.num_threads or os.cpu_count() or 1
    return [
        *("--model", str(model), "--num-threads", str(threads)),
        *("--host", LOOPBACK, "--port", "0", "--metrics-port", "0"),
        *("--device", config.device, "--dtype", config.dtype, "--log-level", config.log_level),
        *(("--drafters", ",".join(config.inside_drafters)) if config.inside_drafters else ()),
    ]


def _drafter_flags(config: SystemConfig, kind: str, drafter_id: str, model: Path | str) -> list[str]:
    return [
        *("--kind", kind, "--drafter-id", drafter_id, "--tokenizer", str(model)),
        *("--host", LOOPBACK, "--port", "0", "--metrics-port", "0", "--log-level", config.log_level),
    ]


def _router_flags(
    config: SystemConfig, model: Path | str, verifier: Child, drafters: tuple[Child, ...], store_url: str
) -> list[str]:
    name = config.served_model_name or Path(str(model)).name
    inside = [f"{drafter_id}={kind}" for kind, drafter_id in _drafter_ids(config.drafters) if _is_inside(config, kind)]
    return [
        *("--model", str(model), "--served-model-name", name, "--host", config.host, "--port", str(config.port)),
        *("--grpc-port", "0", "--metrics-port", "0", "--verifiers", f"{LOOPBACK}:{verifier.port}"),
        *(
            "--drafters",
            ",".join(f"{child.name.removeprefix('drafter-')}={LOOPBACK}:{child.port}" for child in drafters),
        ),
        *("--in-process-drafters", ",".join(inside)),
        *("--redis-url", "none" if store_url == NO_STORE else store_url),
        *("--log-level", config.log_level),
    ]
