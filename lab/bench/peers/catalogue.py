"""Which peers there are, in which environment each runs, and what its variants are called. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moot.core.errors import ConfigError
from moot.shipped import locate


@dataclass(frozen=True, slots=True)
class Variant:
    """In bfloat16 where `label` says nothing else. `plain_of`: the variant whose texts this one's must equal, where it
    speculates; `batches`: many at once."""

    name: str
    label: str
    plain_of: str | None = None
    batches: bool = False


@dataclass(frozen=True, slots=True)
class Peer:
    """One process. `environment`: its virtual environment, empty for this interpreter's; `arguments`: further ones."""

    name: str
    environment: str
    script: str
    variants: tuple[Variant, ...]
    arguments: tuple[str, ...] = ()
    may_be_paused: bool = True


PEERS = (
    Peer(
        "moot",
        "",
        "moot_child",
        (
            Variant("off", "Moot, drafting off", batches=True),
            Variant("on", "Moot, drafting on", plain_of="off", batches=True),
        ),
        may_be_paused=False,
    ),
    Peer(
        "transformers",
        "transformers",
        "transformers_child",
        (
            Variant("plain", "transformers generate"),
            Variant("prompt_lookup", "transformers prompt lookup", plain_of="plain"),
            Variant("assistant", "transformers assisted by our draft model", plain_of="plain"),
        ),
        (str(locate("shipped@neural-smollm2-135m")),),
    ),
    Peer(
        "transformers_continuous",
        "transformers",
        "continuous_child",
        (Variant("continuous", "transformers generate_batch", batches=True),),
    ),
    Peer("vllm", "vllm", "vllm_child", (Variant("vllm", "vLLM", batches=True),), ("plain",)),
    Peer(
        "vllm_ngram",
        "vllm",
        "vllm_child",
        (Variant("ngram", "vLLM n-gram", plain_of="vllm", batches=True),),
        ("ngram",),
    ),
    Peer(
        "llama_cpp",
        "llama_cpp",
        "llama_cpp_child",
        (
            Variant("q4", "llama.cpp 4-bit"),
            Variant("q4_lookup", "llama.cpp 4-bit, prompt lookup", plain_of="q4"),
            Variant("bf16", "llama.cpp bf16"),
            Variant("bf16_lookup", "llama.cpp bf16, prompt lookup", plain_of="bf16"),
        ),
    ),
)


def chosen(names: Iterable[str]) -> list[Peer]:
    """Raises ConfigError for a name there is none of."""
    known = {peer.name: peer for peer in PEERS}
    wanted = list(names)
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no peer is called {name}: there are {', '.join(known)}")
    return [known[name] for name in wanted]
