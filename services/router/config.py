"""The configuration of a router: its own options, and those of its parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moot.client import ROUTER_PORT
from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of, part
from moot.core.speculation.collection import CollectionPolicy
from moot.core.speculation.policy import SpeculationOptions
from moot.drafters.registry import REQUEST_KINDS
from moot.rpc.link import LinkConfig
from moot.rpc.tls import TlsOptions
from moot.runtime.process import ServiceOptions
from moot.tokenizer import HubOptions
from services.router.api.settings import HttpSettings
from services.router.generation.drafter_set import parse_priors
from services.router.peers.links import LinkPolicy
from services.router.peers.outlier_ejection import EjectionPolicy
from services.router.peers.verifier_link import TargetPolicy
from services.router.store.config import StoreConfig


@dataclass(frozen=True, kw_only=True)
class RouterConfig(Options):
    model: str = option(help="folder or hub id whose tokenizer and chat template are the target's")
    revision: str | None = option_of(HubOptions, "revision")
    port: int = option(ROUTER_PORT, help="HTTP port; 0 chooses a free one", minimum=0)
    grpc_port: int = option(8001, help="port of RouterService; 0 chooses a free one", minimum=0)
    service: ServiceOptions = part(ServiceOptions, metrics_port=8002)
    workers: int = option(
        1, help="router processes that share the ports, one core each; every limit is of one process", minimum=1
    )
    reuse_port: bool = option(False, help="let other processes listen on the same HTTP and gRPC port")

    verifiers: tuple[str, ...] = option(
        help="host:port of each verifier, or dns:///name:port, or k8s:///namespace/service:port"
    )
    drafters: tuple[str, ...] = option(
        (), help="id=host:port|host:port for each drafter and its replicas, or dns:/// or k8s:///"
    )
    in_process_drafters: tuple[str, ...] = option(
        (), help="drafters in this process: [id=]kind[:option=value]..., for instance suffix,prompt_lookup"
    )
    request_drafters: tuple[str, ...] = option(
        REQUEST_KINDS,
        help="prediction, sibling: drafters that vote where a request brings what they need: kind[:option=value]...",
    )
    discovery_interval_s: float = option(5.0, help="seconds between look-ups of DNS names", above=0)
    discovery_timeout_s: float = option(
        3.0, help="seconds that one look-up may take; past them the last list stays", above=0
    )

    speculation: SpeculationOptions = part(SpeculationOptions)
    drafter_priors: tuple[str, ...] = option(
        (), help="id=number: weight with which a drafter starts, until it has earned its own; 1 for all others"
    )
    collection_policy: CollectionPolicy = part(CollectionPolicy)
    ejection_policy: EjectionPolicy = part(EjectionPolicy)
    target_policy: TargetPolicy = part(TargetPolicy)
    link_policy: LinkPolicy = part(LinkPolicy)
    store: StoreConfig = part(StoreConfig)

    api_key: tuple[str, ...] = option((), help="keys that callers must show (none, and no file: every caller may)")
    api_keys_file: Path | None = option(None, help="file of sha256 hashes of further keys, one a line")
    limits: HttpSettings = part(HttpSettings)
    """As flags set them; `http` has what follows from other options too."""
    max_buffered_commits: int = option(
        64, help="rounds that a slow client may lag behind before its request pauses", minimum=1
    )
    stall_limit_s: float = option(10.0, help="seconds without a turn of the event loop until /livez fails", above=0)
    tls: TlsOptions = part(TlsOptions)

    def check_together(self) -> None:
        parse_priors(self.drafter_priors)
        if not self.verifiers:
            raise ConfigError("--verifiers must name at least one")

    @property
    def link(self) -> LinkConfig:
        return self.link_policy.link

    @property
    def http(self) -> HttpSettings:
        target = self.target_policy
        return replace(
            self.limits,
            served_model_names=self.limits.served_model_names or (self.model.rstrip("/").rsplit("/", 1)[-1],),
            # A choice's next chunk may need every wait that a request survives.
            chunk_timeout_s=(target.max_moves + 1) * (target.open_timeout_s + target.no_verifier_wait_s)
            + target.verify_timeout_s,
        )
