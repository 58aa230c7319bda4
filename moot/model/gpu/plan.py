"""The layout of a step, made on the host and uploaded as one row of integers.

Rows are put in groups. All rows of a group belong to one request, follow each other in position, and lie in one page of
512 positions. Attention of a row is a sum over pages: of the pages before its own, all 512 slots; of its own, the slots
up to itself. So what a row sees, and in which portions, depends on its position alone. A tree is laid out as the paths
it consists of: a path's own pages are copied to the scratch area with the path's tokens in place, and the rows that no
earlier path had make the groups.

Sizes are rounded up to few values, so that recorded graphs fit many steps. Padding rows write to the trash page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from moot.core.errors import NoCapacity
from moot.model.cache.contiguous import PAGE_SLOTS, round_up
from moot.model.cache.kv_cache import Pending, is_chain, paths
from moot.model.gpu.pool import PagedCache, PagedPool
from moot.model.inputs import CheckedInput

WAVE_PAGES = 16
"""Pages before its own that a row attends to at once; more are taken in waves of this many."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Shapes of a step's tensors. Steps of equal sizes share a recorded graph."""

    rows: int
    groups: int
    group_rows: int
    """Most rows of one group."""
    pages: int
    """Pages per wave, at most WAVE_PAGES."""
    waves: int
    copies: int
    logit_rows: int


@dataclass(frozen=True, slots=True)
class Wave:
    """Attention to pages before the rows' own: sequence p * groups + g is group g against the wave's page p."""

    first_page: int
    cu_rows: Tensor  # int32 [pages * groups + 1], in rows of the step repeated per page
    cu_keys: Tensor  # int32 [pages * groups + 1], first slot of the page; the last entry means nothing
    used: Tensor  # int32 [pages * groups], 512 or 0


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's layout as views of the uploaded integers. int64, except what the attention kernel reads (int32)."""

    sizes: Sizes
    waves: tuple[Wave, ...]
    token_ids: Tensor  # [rows]
    positions: Tensor  # [rows]
    slots: Tensor  # [rows], where keys and values go
    group_of_row: Tensor  # [rows]
    logit_rows: Tensor  # [logit_rows]
    copy_from: Tensor  # [copies]
    copy_to: Tensor  # [copies]
    cu_rows: Tensor  # int32 [groups + 1]
    cu_keys: Tensor  # int32 [groups + 1], first slot of the group's own page; the last entry means nothing
    used: Tensor  # int32 [groups]
    first_position: Tensor  # [groups], position of the first slot of the group's own page


@dataclass(slots=True)
class _Group:
    rows: list[int]
    """Indices in the request's tokens."""
    first_position: int
    page_starts: list[int]
    """First slot of page 0, 1, ... up to the rows' own page."""


class Planner:
    """Lays out one step. `row_multiple`: the number of rows is rounded up to a multiple of it."""

    def __init__(self, pool: PagedPool, row_multiple: int = 1) -> None:
        self._pool = pool
        self._next_scratch = pool.scratch_start
        self._row_multiple = row_multiple
        self.token_ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._groups: list[_Group] = []
        self._copies: list[tuple[np.ndarray, np.ndarray]] = []
        """Slots to copy from and to, before the step attends."""
        self._logit_rows: list[int] = []

    def add(self, item: CheckedInput[PagedCache]) -> None:
        """Lay out one request's tokens and make them the cache's pending ones. The cache has room for all of them."""
        cache, length = item.cache, item.cache.length
        cache.pending = Pending(item.parents, None)
        slots = cache.slots(length, length + len(item.token_ids))
        positions = [length + depth for depth in item.depths]
        row_of: dict[int, int] = {}
        for group in self._chain(cache, positions) if is_chain(item.depths) else self._tree(item, positions, slots):
            for node in group.rows:
                row_of[node] = len(self.token_ids)
                self.token_ids.append(item.token_ids[node])
                self._positions.append(positions[node])
                self._slots.append(int(slots[node]))
            self._groups.append(group)
        self._logit_rows += [row_of[row] for row in item.logit_rows]

    def _chain(self, cache: PagedCache, positions: Sequence[int]) -> Iterator[_Group]:
        starts = [page * PAGE_SLOTS for page in cache.pages]
        for page, rows in _by_page(range(len(positions)), positions):
            yield _Group(rows, positions[rows[0]], starts[: page + 1])

    def _tree(self, item: CheckedInput[PagedCache], positions: Sequence[int], slots: np.ndarray) -> Iterator[_Group]:
        cache, length, first_touched = item.cache, item.cache.length, item.cache.length // PAGE_SLOTS
        starts = [page * PAGE_SLOTS for page in cache.pages[:first_touched]]
        for path, new in paths(item.parents):
            touched: list[int] = []
            for page in range(first_touched, positions[path[-1]] // PAGE_SLOTS + 1):
                begin, end = page * PAGE_SLOTS, min((page + 1) * PAGE_SLOTS, length + len(path))
                committed = cache.slots(begin, max(begin, min(end, length)))
                own = slots[path[max(0, begin - length) : max(0, end - length)]]
                sources = np.concatenate((committed, own))
                touched.append(self._take_scratch(len(sources)))
                self._copies.append((sources, np.arange(touched[-1], self._next_scratch)))
            for page, rows in _by_page(new, positions):
                yield _Group(rows, positions[rows[0]], [*starts, *touched[: page - first_touched + 1]])

    def _take_scratch(self, num_slots: int) -> int:
        """First of `num_slots` slots in a row of the scratch area. Raises NoCapacity."""
        first, self._next_scratch = self._next_scratch, self._next_scratch + num_slots
        if self._next_scratch > self._pool.trash:
            raise NoCapacity("the trees of one step need more scratch slots than there are")
        return first

    def finish(self, exact: bool) -> tuple[Sizes, np.ndarray]:
        """The sizes and the integers to upload. `exact`: round nothing up, for steps that no graph is kept for."""
        rows: Callable[[int], int] = int if exact else _round_rows
        power: Callable[[int], int] = int if exact else _power
        most_pages = max(len(group.page_starts) - 1 for group in self._groups)
        sizes = Sizes(
            rows=round_up(rows(len(self.token_ids)), self._row_multiple),
            # One group more than there are: it takes the padding rows.
            groups=power(len(self._groups) + 1),
            group_rows=power(max(len(group.rows) for group in self._groups)),
            pages=power(min(most_pages, WAVE_PAGES)),
            waves=-(-most_pages // WAVE_PAGES),
            copies=power(sum(len(sources) for sources, _ in self._copies)),
            logit_rows=rows(len(self._logit_rows)),
        )
        return sizes, self._pack(sizes)

    def _pack(self, sizes: Sizes) -> np.ndarray:
        trash = self._pool.trash
        counts = [len(group.rows) for group in self._groups]
        counts.append(sizes.rows - sum(counts))
        counts += [0] * (sizes.groups - len(counts))
        boundaries = np.concatenate(([0], np.cumsum(counts)))
        own = np.full((3, sizes.groups), [[trash], [1], [0]], dtype=np.int64)
        for index, group in enumerate(self._groups):
            own[:, index] = (
                group.page_starts[-1],
                group.first_position % PAGE_SLOTS + len(group.rows),
                group.first_position // PAGE_SLOTS * PAGE_SLOTS,
            )
        parts = [
            _padded(self.token_ids, sizes.rows, 0),
            _padded(self._positions, sizes.rows, 0),
            _padded(self._slots, sizes.rows, trash),
            np.repeat(np.arange(sizes.groups), counts),
            _padded(self._logit_rows, sizes.logit_rows, 0),
            _padded([slot for sources, _ in self._copies for slot in sources], sizes.copies, trash),
            _padded([slot for _, targets in self._copies for slot in targets], sizes.copies, trash),
            boundaries,
            np.append(own[0], 0),
            own[1],
            own[2],
        ]
        for wave in range(sizes.waves):
            starts = np.full((sizes.pages, sizes.groups), trash, dtype=np.int64)
            used = np.zeros((sizes.pages, sizes.groups), dtype=np.int64)
            for index, group in enumerate(self._groups):
                earlier = group.page_starts[wave * WAVE_PAGES : -1][: sizes.pages]
                starts[: len(earlier), index] = earlier
                used[: len(earlier), index] = PAGE_SLOTS
            shifts = np.arange(sizes.pages)[:, None] * sizes.rows
            parts += [
                np.append((boundaries[None, :-1] + shifts).ravel(), sizes.pages * sizes.rows),
                np.append(starts.ravel(), 0),
                used.ravel(),
            ]
        return np.concatenate(parts).astype(np.int64)


def unpack(sizes: Sizes, packed: Tensor) -> DevicePlan:
    """Views of `packed` (int64, on the device); the kernel's own arguments are cast."""
    groups, pairs = sizes.groups, sizes.pages * sizes.groups
    own = [*[sizes.rows] * 4, sizes.logit_rows, *[sizes.copies] * 2, groups + 1, groups + 1, groups, groups]
    parts = list(packed.split([*own, *[pairs + 1, pairs + 1, pairs] * sizes.waves]))
    for at in (7, 8, 9, *range(11, len(parts))):
        parts[at] = parts[at].to(torch.int32)
    waves = [Wave(wave * WAVE_PAGES, *parts[11 + 3 * wave : 14 + 3 * wave]) for wave in range(sizes.waves)]
    return DevicePlan(sizes, tuple(waves), *parts[:11])


def _by_page(nodes: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Consecutive nodes of one page each, with the page's index. `positions`: of all nodes."""
    for page, found in groupby(nodes, lambda node: positions[node] // PAGE_SLOTS):
        yield page, list(found)


def _padded(values: Sequence[int] | np.ndarray, size: int, filler: int) -> np.ndarray:
    result = np.full(size, filler, dtype=np.int64)
    result[: len(values)] = values
    return result


def _power(number: int) -> int:
    """The number rounded up: 0, or the next power of two."""
    return 1 << (number - 1).bit_length() if number > 0 else 0


def _round_rows(number: int) -> int:
    """The number of rows rounded up to a multiple of 1, 2, 4, 8, ... so that at most a quarter is padding."""
    step = max(1, _power(number) // 8)
    return round_up(number, step)
