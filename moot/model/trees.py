"""Trees of tokens as rows of a step: each token names the index of its parent, which comes before it, or ROOT."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moot.core.types import ROOT


def depths_of(parents: Sequence[int]) -> list[int]:
    """Raises ValueError where a parent does not come before its child."""
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
