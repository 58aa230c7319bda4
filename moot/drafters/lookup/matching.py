"""Where the end of one text occurs in another: a search of the whole text, for texts too short-lived for an index."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def occurrences(
    text: NDArray[np.uint32], tail: Sequence[int], keep: NDArray[np.bool_] | None = None
) -> list[NDArray[np.intp]]:
    """Places behind the occurrences of the end of `tail`. Entry n - 1: the indices of `text`, rising, behind each
    occurrence of its last n ids.

    For n = 1, 2, ... as long as there is one. An index may be len(text): nothing follows there. `keep` [len(text)]:
    looks only at occurrences whose last id stands where it is true.
    """
    found: list[NDArray[np.intp]] = []
    indices = np.arange(0)
    for size in range(1, len(tail) + 1):
        wanted = tail[-size]
        if size == 1:
            hits = text == wanted
            indices = np.flatnonzero(hits if keep is None else hits & keep) + 1
        else:
            indices = indices[indices >= size]
            indices = indices[text[indices - size] == wanted]
        if not len(indices):
            break
        found.append(indices)
    return found
