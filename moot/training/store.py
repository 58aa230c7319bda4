"""Training text on disk: shards of rows, each a folder of arrays that appears whole or not at all.

Of each position: the token's id, its role (script.py), and what the target makes of it: the id it finds likeliest to
come next, the logarithm of the sum of its exponentiated logits, and its last hidden state, bfloat16. With 576 numbers
in a state that is 1,165 bytes. Arrays are mapped into memory when read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moot.core.errors import ConfigError

_FORMAT = 1
_MANIFEST, _META = "manifest.json", "meta.json"


HELD_OUT_EVERY, HELD_OUT = 16, 3


def is_held_out(row: int) -> bool:
    """Whether nothing is learned from row number `row` of a shard: acceptance is reported on these rows."""
    return row % HELD_OUT_EVERY == HELD_OUT


@dataclass(frozen=True, slots=True)
class Shard:
    """`token_ids` and `best` uint32, `roles` uint8, `log_totals` float32: [rows, positions]; `hidden` [rows, positions,
    width] uint16, the bits of bfloat16 numbers."""

    token_ids: NDArray[np.uint32]
    roles: NDArray[np.uint8]
    best: NDArray[np.uint32]
    log_totals: NDArray[np.float32]
    hidden: NDArray[np.uint16]

    @property
    def num_positions(self) -> int:
        return int(self.token_ids.size)

    def states(self, rows: Any = slice(None)) -> Tensor:
        """bfloat16 [..., positions, width] of the given rows: a copy."""
        return torch.from_numpy(self.hidden[rows].copy().view(np.int16)).view(torch.bfloat16)


def bits(hidden: Tensor) -> NDArray[np.uint16]:
    """The bits of numbers rounded to bfloat16."""
    rounded: NDArray[np.int16] = hidden.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return rounded.view(np.uint16)


class TextStore:
    """A folder of shards. Shard i is a function of the manifest and i alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"no training text in {folder}: {error}") from error
        if self.manifest.get("format") != _FORMAT:
            raise ConfigError(f"training text in {folder} has another format: make it again")

    @classmethod
    def create(cls, folder: Path, manifest: Mapping[str, Any]) -> TextStore:
        """Open it, or make it where there is none. Raises ConfigError when it is there with another manifest."""
        wanted = {"format": _FORMAT, **manifest}
        if not (folder / _MANIFEST).exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{_MANIFEST}.{os.getpid()}"
            temporary.write_text(json.dumps(wanted, indent=1) + "\n")
            temporary.replace(folder / _MANIFEST)
        store = cls(folder)
        if store.manifest != wanted:
            raise ConfigError(f"training text in {folder} was made with other settings")
        return store

    def __contains__(self, index: int) -> bool:
        return (self._path(index) / _META).is_file()

    def indices(self) -> list[int]:
        return sorted(int(path.parent.name) for path in self.folder.glob(f"[0-9]*/{_META}"))

    def meta(self, index: int) -> dict[str, Any]:
        """`shape` [rows, positions], `numerics`, `seconds`."""
        meta: dict[str, Any] = json.loads((self._path(index) / _META).read_text())
        return meta

    @property
    def num_positions(self) -> int:
        return sum(int(np.prod(self.meta(index)["shape"])) for index in self.indices())

    def write(self, index: int, shard: Shard, meta: Mapping[str, Any]) -> None:
        """Raises OSError; the shard is there only if it is complete."""
        temporary = self.folder / f".{index:05d}.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        for name in Shard.__slots__:
            np.save(temporary / f"{name}.npy", getattr(shard, name))
        (temporary / _META).write_text(json.dumps({"shape": shard.token_ids.shape, **meta}) + "\n")
        try:
            temporary.rename(self._path(index))
        except OSError:
            if index not in self:
                raise
            # Somebody else made the same shard meanwhile: it is equal.
            shutil.rmtree(temporary)

    def read(self, index: int) -> Shard:
        folder = self._path(index)
        try:
            return Shard(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Shard.__slots__))
        except (OSError, ValueError) as error:
            raise ConfigError(f"training text {folder} cannot be read: {error}") from error

    def shards(self) -> Iterator[tuple[int, Shard]]:
        for index in self.indices():
            yield index, self.read(index)

    def _path(self, index: int) -> Path:
        return self.folder / f"{index:05d}"
