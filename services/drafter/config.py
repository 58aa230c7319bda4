"""The configuration of a drafter: its own options, and those of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of, part
from moot.core.speculation.length import MOST_SPECULATIVE_TOKENS
from moot.model.compute import ComputeOptions
from moot.rpc.link import LinkConfig
from moot.rpc.tls import TlsOptions
from moot.runtime.process import PeerOptions


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(Options):
    kind: str = option(
        help="drafter kind: prompt_lookup, suffix, ngram, recycling, neural, superposed or an installed one"
    )
    drafter_id: str = option("", help="name of the drafter in its proposals (empty: the kind's)")
    model: str | None = option(
        None,
        help="draft model (neural, superposed), or model whose tokenizer is used (other kinds): folder or hub id",
    )
    tokenizer: str | None = option(None, help="folder or hub id of the tokenizer: its vocabulary and fingerprint")
    kind_option: tuple[str, ...] = option(
        (), flag="option", help="options of the kind, name=value, separated by commas"
    )
    num_threads: int = option_of(
        ComputeOptions, "num_threads", help="compute threads of a draft model; 0 leaves the choice to torch"
    )
    service: PeerOptions = part(PeerOptions, port=7200, metrics_port=7201, drain_grace_s=10.0)

    max_num_seqs: int = option(
        256, help="most sessions at a time; one more closes the least recently used one", minimum=1
    )
    max_batch: int = option(32, help="most asks drafted for in one batch", minimum=1)
    max_speculative_tokens: int = option(
        MOST_SPECULATIVE_TOKENS, help="most tokens drafted for one ask, whatever it asks for", minimum=1
    )
    max_width: int = option(8, help="most proposals for one ask, whatever it asks for", minimum=1)
    draft_ahead: str = option(
        "auto",
        help="draft the next proposal while the last one is verified; auto: on where the drafter computes on a device, "
        "or is pinned to cores of its own",
        choices=("auto", "on", "off"),
    )
    link: LinkConfig = part(LinkConfig)
    tls: TlsOptions = part(TlsOptions)

    def check_together(self) -> None:
        if bad := [pair for pair in self.kind_option if "=" not in pair]:
            raise ConfigError(f"--option must be name=value, separated by commas: {', '.join(bad)}")

    @property
    def kind_options(self) -> dict[str, str]:
        """The options that `--option` gave, by name."""
        return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in self.kind_option)}
