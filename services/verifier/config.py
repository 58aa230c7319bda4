"""Everything a verifier can be told, every bound and every wait. A default stands once: here, or in rpc/link.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moot.config import option
from moot.core.errors import ConfigError
from moot.rpc.link import LinkOptions


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(LinkOptions):
    model: str = option(help="target model: a local folder or a hub id")
    revision: str | None = option(None, help="pinned revision of a hub id")
    host: str = option("127.0.0.1", help="address to listen on")
    port: int = option(7100, help="gRPC port; 0 chooses a free one")
    metrics_port: int = option(7101, help="port of /metrics, /livez and /readyz; 0 chooses a free one")
    vllm_metric_names: bool = option(
        False, help="expose running, queued and KV use under vLLM's names as well, for an inference gateway"
    )
    ready_file: Path | None = option(None, help="written as JSON with the bound ports once requests are served")
    log_level: str = option("info", help="least level logged", choices=("debug", "info", "warning", "error"))

    device: str = option("auto", help="where the model runs", choices=("auto", "cpu", "cuda"))
    dtype: str = option("auto", help="number format", choices=("auto", "bfloat16", "float16", "float32", "float64"))
    deterministic: str = option(
        "auto", help="numbers that do not depend on batch-mates; auto: on for the CPU", choices=("auto", "on", "off")
    )
    native_kernels: bool = option(
        True, help="compute what lies between products by kernels, compiled at first start, where CPU and gcc allow it"
    )
    num_threads: int = option(0, help="compute threads; 0 leaves the choice to torch")

    drafters: tuple[str, ...] = option(
        (), help="drafters inside the verifier, which propose with each answer: [id=]kind[:option=value]... each"
    )

    max_model_len: int = option(0, help="prompt plus output, in tokens; 0: the model's own limit")
    max_num_seqs: int = option(32, help="sessions that hold KV cache at a time, so requests in a batch")
    max_num_batched_tokens: int = option(1024, help="tokens of one forward pass, drafts and prefill chunks together")
    prefill_chunk_tokens: int = option(256, help="prompt tokens of one forward pass, all prompts together")
    gather_share: float | None = option(
        None,
        help="part of a step's time that the next one may wait for drafts that usually come so soon; 0: none; "
        "none given: 0.5 on the CPU, 0 elsewhere",
    )
    max_draft_tokens: int = option(64, help="draft tokens that one verify may carry")
    max_waiting_seqs: int = option(256, help="sessions that may wait for KV cache; more are refused")
    max_waiting_tokens: int = option(1_048_576, help="prompt tokens that may wait for prefill; more are refused")
    max_queued_commands: int = option(8192, help="commands of one stream not yet taken; past it the stream is ended")
    max_queued_answers: int = option(8192, help="answers of one stream not yet sent; past it the stream is ended")

    kv_capacity_tokens: int = option(0, help="KV cache in tokens; 0: from --kv-memory-fraction")
    kv_memory_fraction: float = option(0.25, help="part of the free memory for KV and prefix cache, 0 to 1")
    prefix_cache_tokens: int = option(16_384, help="prompt tokens kept for later prompts; 0 switches it off")
    prefix_block_tokens: int = option(64, help="prompt tokens shared as one block")

    heartbeat_interval_s: float = option(1.0, help="seconds between heartbeats on a stream")
    stall_limit_s: float = option(30.0, help="seconds without progress, with work queued, until /livez says no")
    session_idle_limit_s: float = option(120.0, help="seconds without a command after which a session is freed")
    drain_grace_s: float = option(20.0, help="seconds that running sessions may finish in after SIGTERM")
    stop_timeout_s: float = option(10.0, help="seconds to wait for the compute thread when stopping")

    def __post_init__(self) -> None:
        """Raises ConfigError for values that cannot work together."""
        self.require_positive(
            *("max_num_seqs", "prefill_chunk_tokens", "prefix_block_tokens", "max_queued_commands"),
            *("max_queued_answers", "heartbeat_interval_s", "stall_limit_s", "session_idle_limit_s", "stop_timeout_s"),
        )
        self.require_not_negative(
            *("max_model_len", "max_draft_tokens", "max_waiting_seqs", "kv_capacity_tokens", "num_threads")
        )
        if self.max_num_batched_tokens < self.prefill_chunk_tokens + self.max_draft_tokens + 1:
            raise ConfigError("max_num_batched_tokens must hold a prefill chunk and one draft")
        if self.gather_share is not None and not 0 <= self.gather_share <= 1:
            raise ConfigError("gather_share must be 0 to 1")
        if not 0 < self.kv_memory_fraction <= 1:
            raise ConfigError("kv_memory_fraction must be above 0 and at most 1")
