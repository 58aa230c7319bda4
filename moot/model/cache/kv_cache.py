"""The KV cache of one sequence as steps and sessions see it: which tokens it holds, wherever their numbers lie.

Tokens of a step may form a tree: each token names the index of its parent, which comes before it, or ROOT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from moot.core.types import ROOT


def depths_of(parents: Sequence[int]) -> list[int]:
    """Depth of each token in the tree. Raises ValueError where a parent does not come before its child."""
    depths: list[int] = []
    for index, parent in enumerate(parents):
        if not ROOT <= parent < index:
            raise ValueError(f"parent {parent} of token {index} must come before it")
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


def is_chain(depths: Sequence[int]) -> bool:
    """Whether each token's parent is the one before it, the first one's the root."""
    return all(depth == index for index, depth in enumerate(depths))


def paths(parents: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """For each leaf its path from the root, and the nodes of it that no earlier leaf's path had."""
    inner, done = set(parents), set[int]()
    for leaf in range(len(parents)):
        if leaf in inner:
            continue
        path = [leaf]
        while parents[path[-1]] != ROOT:
            path.append(parents[path[-1]])
        path.reverse()
        new = [node for node in path if node not in done]
        done.update(new)
        yield path, new


@dataclass(slots=True, eq=False)
class Pending:
    """Tokens of the last forward pass that are not committed yet.

    `parents[i]` < i is the parent of token i, or ROOT. `tree_kv`: the tokens' numbers where they do not lie in the
    cache's own slots.
    """

    parents: Sequence[int]
    tree_kv: Tensor | None


class KvCache(ABC):
    """`length` tokens are committed, at positions 0..length - 1. A forward pass leaves its tokens pending; `commit`
    keeps the ones that lie on the accepted path. Not thread-safe: one compute thread."""

    length: int
    pending: Pending | None

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Slots charged to the pool: whole pages."""

    @abstractmethod
    def reserve(self, num_tokens: int) -> None:
        """Make room for `num_tokens` in all. Raises NoCapacity or what the allocator does; then nothing has changed."""

    @abstractmethod
    def reserve_step(self, num_tokens: int, num_levels: int) -> None:
        """Make room for a step's tokens, a tree of `num_levels` levels. Raises as `reserve`."""

    def commit(self, kept: Sequence[int]) -> None:
        """Keep the pending tokens with these indices: a path from the root, each the parent of the next.

        All other pending tokens are dropped. Raises ValueError when `kept` is no such path.
        """
        pending, self.pending = self.pending, None
        if not kept:
            return
        if pending is None:
            raise ValueError("nothing is pending")
        parent = ROOT
        for index in kept:
            if not 0 <= index < len(pending.parents) or pending.parents[index] != parent:
                raise ValueError("the kept tokens are not a path from the root")
            parent = index
        self._keep(pending, kept)
        self.length += len(kept)

    def crop(self, length: int) -> None:
        """Forget everything from position `length` on, pending tokens included. Pages above are given back."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop {self.length} tokens to {length}")
        self.pending = None
        self.length = length
        self._shrink()

    @abstractmethod
    def wipe(self) -> None:
        """Forget pending tokens, and clear what rejected ones have left in the slots after the committed ones."""

    def read_block(self, start: int, end: int) -> Tensor:
        """A copy of the committed slots start..end: [layers, 2, end - start, kv_heads, head_dim]."""
        if not 0 <= start <= end <= self.length:
            raise ValueError(f"slots {start} to {end} are not committed ({self.length} are)")
        return self._read(start, end)

    def append_block(self, block: Tensor) -> None:
        """Commit a block that `read_block` gave, computed at exactly these positions after the same prefix."""
        self.pending = None
        num_tokens = block.shape[2]
        self.reserve(self.length + num_tokens)
        self._write(block)
        self.length += num_tokens

    @abstractmethod
    def free(self) -> None:
        """Give every slot back. The cache is empty afterwards and may be used again."""

    @abstractmethod
    def _keep(self, pending: Pending, kept: Sequence[int]) -> None:
        """Bring these pending tokens to the positions after the committed ones."""

    @abstractmethod
    def _shrink(self) -> None:
        """Give back pages above `length`; one of slack stays, so that a crop at a page's border costs nothing."""

    @abstractmethod
    def _read(self, start: int, end: int) -> Tensor: ...

    @abstractmethod
    def _write(self, block: Tensor) -> None:
        """Write into the slots after the committed ones, which are there."""
