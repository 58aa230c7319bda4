"""How many tokens of KV cache there is memory for."""

from __future__ import annotations

from pathlib import Path

import torch

from moot.core.errors import ConfigError
from moot.model.kv import PAGE_SLOTS, KvShape
from services.verifier.config import VerifierConfig

_CGROUP = Path("/sys/fs/cgroup")


def kv_capacity_tokens(config: VerifierConfig, shape: KvShape, context_limit: int) -> int:
    """Tokens of KV: as told, else what the share of the free memory holds beside the prefix cache.

    Never more than `max_num_seqs` sessions of the longest kind can use. Raises ConfigError when not a page fits.
    """
    if config.kv_capacity_tokens:
        return config.kv_capacity_tokens
    budget = int(free_bytes(shape.device) * config.kv_memory_fraction)
    tokens = budget // shape.bytes_per_token - config.prefix_cache_tokens
    if tokens < PAGE_SLOTS:
        raise ConfigError(
            f"{budget >> 20} MiB hold {max(tokens, 0)} tokens of KV beside the prefix cache;"
            " raise --kv-memory-fraction or lower --prefix-cache-tokens"
        )
    longest = min(context_limit, config.max_model_len or context_limit)
    pages = -(-longest // PAGE_SLOTS) * config.max_num_seqs
    return min(tokens // PAGE_SLOTS, pages) * PAGE_SLOTS


def free_bytes(device: torch.device) -> int:
    """Memory that may still be used on `device`: of the GPU, or of the host and this container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _read_number(_CGROUP / "memory.max"), _read_number(_CGROUP / "memory.current")
    return available if limit is None or used is None else max(0, min(available, limit - used))


def _read_number(path: Path) -> int | None:
    """None where there is no such file or it says that there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
