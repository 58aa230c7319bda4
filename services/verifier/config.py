"""The configuration of a verifier: its own options, and those of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from moot.core.errors import ConfigError
from moot.core.options import Options, option, option_of, part
from moot.core.scheduler import BatchOptions
from moot.model.compute import ComputeOptions
from moot.rpc.link import HEARTBEAT_INTERVAL_S, LinkConfig
from moot.rpc.tls import TlsOptions
from moot.runtime.process import PeerOptions
from moot.tokenizer import HubOptions


@dataclass(frozen=True, kw_only=True)
class VerifierConfig(Options):
    model: str = option(help="target model: a local folder or a hub id")
    revision: str | None = option_of(HubOptions, "revision")
    service: PeerOptions = part(PeerOptions, port=7100, metrics_port=7101)
    vllm_metric_names: bool = option(
        False, help="expose running, queued and KV use under vLLM's names as well, for an inference gateway"
    )

    compute: ComputeOptions = part(ComputeOptions)
    batch_invariant: str = option(
        "auto",
        help="outputs that do not depend on batch-mates, bit by bit; auto: on for the CPU",
        choices=("auto", "on", "off"),
    )
    native_kernels: bool = option(
        True, help="compute layers by native kernels, compiled at first start, where CPU and gcc allow it"
    )

    drafters: tuple[str, ...] = option(
        (), help="drafters attached to the verifier, which propose with each answer: [id=]kind[:option=value]... each"
    )

    max_model_len: int = option(0, help="prompt plus output, in tokens; 0: the model's own limit", minimum=0)
    max_num_seqs: int = option(
        32, help="most sessions that hold KV cache at a time, which is the largest batch", minimum=1
    )
    batches: BatchOptions = part(BatchOptions)
    batching_delay_share: float | None = option(
        None,
        help="part of a step's time that the next one may wait for drafts that usually come so soon; 0: none; "
        "none given: 0.5 on the CPU, 0 elsewhere",
        minimum=0,
        maximum=1,
    )
    max_draft_tokens: int = option(64, help="most draft tokens of one verification", minimum=0)
    max_waiting_seqs: int = option(256, help="most sessions that wait for KV cache; more are refused", minimum=0)
    max_waiting_tokens: int = option(
        1_048_576, help="most prompt tokens that wait for prefill; more are refused", minimum=0
    )

    kv_capacity_tokens: int = option(0, help="size of the KV cache in tokens; 0: from --kv-memory-fraction", minimum=0)
    kv_memory_fraction: float = option(
        0.25, help="part of the free memory for KV and prefix cache, 0 to 1", above=0, maximum=1
    )
    prefix_cache_tokens: int = option(
        16_384, help="prompt tokens kept in the prefix cache for later prompts; 0 switches it off", minimum=0
    )
    prefix_block_tokens: int = option(64, help="prompt tokens of one block of the prefix cache", minimum=1)

    heartbeat_interval_s: float = option(HEARTBEAT_INTERVAL_S, help="seconds between heartbeats on a stream", above=0)
    link: LinkConfig = part(LinkConfig)
    tls: TlsOptions = part(TlsOptions)

    def check_together(self) -> None:
        if self.batches.max_num_batched_tokens < self.batches.prefill_chunk_tokens + self.max_draft_tokens + 1:
            raise ConfigError("max_num_batched_tokens must hold a prefill chunk and one draft")
