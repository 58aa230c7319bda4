"""How often each token id occurs in prompt and output, kept incrementally, with an overlay for draft tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class History:
    """Counts over the committed prefix of one request, for penalties and min_tokens.

    Ids are kept in the order first seen, each once, beside their count in the output (0: only in the prompt).
    """

    __slots__ = ("_counts", "_ids", "_num_output", "_slots")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int] = ()) -> None:
        self._ids = array("q", dict.fromkeys(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids)}
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._num_output = 0
        self.append(output_token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return self._num_output

    def append(self, output_token_ids: Iterable[int]) -> None:
        """Count committed output ids."""
        for token_id in output_token_ids:
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._slots[token_id] = len(self._ids)
                self._ids.append(token_id)
                self._counts.append(0)
            self._counts[slot] += 1
            self._num_output += 1

    def with_path(self, path: Sequence[int]) -> HistoryOnPath:
        """This history followed by the draft tokens `path`. Valid until the next `append`."""
        return HistoryOnPath(self, tuple(path))

    def seen(self) -> tuple[array[int], array[int]]:
        """Distinct ids of prompt and output, and the output count of each (int64). Copies: the caller's to keep."""
        return self._ids[:], self._counts[:]

    def _seen_with(self, path: Sequence[int]) -> tuple[array[int], array[int]]:
        ids, counts = self.seen()
        added: dict[int, int] = {}
        for token_id in path:
            slot = self._slots.get(token_id, added.get(token_id))
            if slot is None:
                slot = added[token_id] = len(ids)
                ids.append(token_id)
                counts.append(0)
            counts[slot] += 1
        return ids, counts


class HistoryOnPath:
    """A history plus the accepted draft tokens before a position, without touching the history itself."""

    __slots__ = ("_base", "_path")

    def __init__(self, base: History, path: tuple[int, ...]) -> None:
        self._base = base
        self._path = path

    @property
    def num_output(self) -> int:
        return self._base.num_output + len(self._path)

    def seen(self) -> tuple[array[int], array[int]]:
        return self._base._seen_with(self._path)
