"""Tokenizers: loading one, and the fingerprint by which parts that talk in token ids recognise each other.

Imports no torch: the router uses it too.
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from moot.core.errors import ConfigError
from moot.core.options import Options, option


def keep_torch_out() -> None:
    """Keep torch out of a process that runs no model: from here on it cannot import torch, even where it is installed.

    transformers imports whatever it finds; a tokenizer alone then costs a third of the time and of the memory.
    """
    if "torch" not in sys.modules:
        cast("dict[str, Any]", sys.modules)["torch"] = None
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "models won't be available": on purpose


@dataclass(frozen=True, kw_only=True)
class HubOptions(Options):
    """The option that a hub id of a model leaves open."""

    revision: str | None = option(None, help="pinned revision of a hub id")


def load_tokenizer(path_or_id: str | Path, revision: str | None = None) -> Any:
    """A transformers tokenizer from a local folder or hub id. Raises ConfigError when there is none."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path_or_id), revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"no tokenizer at {path_or_id}: {error}") from error


def vocabulary_size(tokenizer: Any) -> int:
    """One more than the highest id the tokenizer knows."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 over all (id, token bytes, special) sorted by id: equal only if every id means the same text."""
    special = set(tokenizer.all_special_ids)
    special.update(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0])):
        token_bytes = token.encode("utf-8", "surrogatepass")
        digest.update(token_id.to_bytes(4, "little"))
        digest.update(len(token_bytes).to_bytes(4, "little"))
        digest.update(token_bytes)
        digest.update(b"\x01" if token_id in special else b"\x00")
    return digest.hexdigest()
