"""Everything a drafter can be told, every bound and every wait. A default stands once: here, or in rpc/link.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moot.config import option as setting
from moot.core.errors import ConfigError
from moot.rpc.link import LinkOptions


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(LinkOptions):
    kind: str = setting(
        help="drafter kind: prompt_lookup, suffix, ngram, recycling, neural, superposed or an installed one"
    )
    drafter_id: str = setting("", help="name written into proposals (empty: the kind's)")
    model: str | None = setting(
        None,
        help="draft model (neural, superposed), or whose tokenizer it is (other kinds): a local folder or a hub id",
    )
    tokenizer: str | None = setting(None, help="folder or hub id of the tokenizer: its vocabulary and fingerprint")
    option: tuple[str, ...] = setting((), help="options of the kind, name=value, separated by commas")
    num_threads: int = setting(0, help="compute threads of a draft model; 0 leaves the choice to torch")

    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(7200, help="gRPC port; 0 chooses a free one")
    metrics_port: int = setting(7201, help="port of /metrics, /livez and /readyz; 0 chooses a free one")
    ready_file: Path | None = setting(None, help="written as JSON with the bound ports once requests are served")
    log_level: str = setting("info", help="least level logged", choices=("debug", "info", "warning", "error"))

    max_num_seqs: int = setting(256, help="sessions at a time; one more closes the least recently used one")
    max_batch: int = setting(32, help="asks drafted for together")
    max_queued_commands: int = setting(8192, help="commands of one stream not yet taken; past it the stream is ended")
    max_queued_answers: int = setting(8192, help="answers of one stream not yet sent; past it the stream is ended")
    max_speculative_tokens: int = setting(64, help="tokens drafted for one ask at most, whatever it asks for")
    max_width: int = setting(8, help="proposals for one ask at most, whatever it asks for")
    draft_ahead: str = setting(
        "auto",
        help="draft the next proposal while the last one is verified; auto: on where the drafter computes on a device, "
        "or is pinned to cores of its own",
        choices=("auto", "on", "off"),
    )
    session_idle_limit_s: float = setting(120.0, help="seconds without a command after which a session is freed")
    stall_limit_s: float = setting(30.0, help="seconds that one batch may take until /livez says no")
    drain_grace_s: float = setting(10.0, help="seconds that peers may take to leave after SIGTERM")
    stop_timeout_s: float = setting(10.0, help="seconds to wait for the drafting thread when stopping")

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work, and for options that are not name=value."""
        self.require_positive(
            *("max_num_seqs", "max_batch", "max_queued_commands", "max_queued_answers", "max_speculative_tokens"),
            *("max_width", "session_idle_limit_s", "stall_limit_s", "drain_grace_s", "stop_timeout_s"),
        )
        self.require_not_negative("num_threads")
        if bad := [pair for pair in self.option if "=" not in pair]:
            raise ConfigError(f"--option must be name=value, separated by commas: {', '.join(bad)}")

    @property
    def kind_options(self) -> dict[str, str]:
        """What `--option` gave, by name."""
        return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in self.option)}
