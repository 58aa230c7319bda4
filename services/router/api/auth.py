"""API keys as bearer tokens. Only sha256 hashes are kept; comparing takes the same time whichever key matches."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path

from moot.core.errors import ConfigError, Unauthenticated

_HASH = re.compile(r"[0-9a-fA-F]{64}")
_MAX_KEY_CHARS = 1024

ANONYMOUS = ""
"""The caller when no keys are configured."""


class ApiKeys:
    """The API keys with which callers may call. Without any key, every caller is ANONYMOUS."""

    def __init__(self, hashes: Iterable[str] = ()) -> None:
        """`hashes`: sha256 of each key, in hexadecimal. Raises ConfigError for anything else."""
        self._hashes: tuple[str, ...] = tuple(text.strip().lower() for text in hashes)
        if any(not _HASH.fullmatch(text) for text in self._hashes):
            raise ConfigError("an API key hash must be the 64 hexadecimal digits of a sha256")

    @classmethod
    def from_keys(cls, keys: Iterable[str]) -> ApiKeys:
        """Made from the keys themselves, which are not kept."""
        return cls(key_hash(key) for key in keys)

    @classmethod
    def from_file(cls, path: Path) -> ApiKeys:
        """Made from a file with one hash a line; empty lines and lines that begin with # are skipped."""
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the API key hashes in {path}") from error
        hashes = [line for line in lines if line and not line.startswith("#")]
        if not hashes:
            raise ConfigError(f"{path} has no API key hash")
        return cls(hashes)

    def __or__(self, other: ApiKeys) -> ApiKeys:
        return ApiKeys(dict.fromkeys(self._hashes + other._hashes))

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def caller(self, authorization: str | None) -> str:
        """The caller, as the hash of the key in an `Authorization: Bearer` header. Raises Unauthenticated."""
        if not self._hashes:
            return ANONYMOUS
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key or len(key) > _MAX_KEY_CHARS:
            raise Unauthenticated("an API key is required: Authorization: Bearer KEY")
        offered = key_hash(key)
        # No early exit: the time must not tell which hash was met, or how far.
        if not sum(hmac.compare_digest(offered, known) for known in self._hashes):
            raise Unauthenticated("the API key is not valid")
        return offered


def key_hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
