"""The layout of a step, made on the host and uploaded as one row of integers.

Rows are put in groups. All rows of a group belong to one request, follow each other in position, and lie in one page of
512 positions. Attention of a row is a sum over pages: of the pages before its own, all 512 slots; of its own, the slots
up to itself. So what a row sees, and in which portions, depends on its position alone. A tree is laid out as the paths
it consists of: a path's own pages are copied to the scratch area with the path's tokens in place, and the rows that no
earlier path had make the groups.

Sizes are rounded up to few values, so that recorded graphs fit many steps. Padding rows write to the trash page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from moot.model.cache.contiguous import PAGE_SLOTS, round_up
from moot.model.cache.kv_cache import Pending, is_chain, paths
from moot.model.gpu.pool import PagedCache, PagedPool, Scratch

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

    cu_rows: Tensor  # int32 [pages * groups + 1], in rows of the step repeated per page
    cu_keys: Tensor  # int32 [pages * groups + 1], first slot of the page; the last entry means nothing
    used: Tensor  # int32 [pages * groups], 512 or 0
    first_page: int


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's layout as views of the uploaded integers. int64, except what the attention kernel reads (int32)."""

    sizes: Sizes
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
    waves: tuple[Wave, ...]


@dataclass(slots=True)
class _Group:
    rows: list[int]
    """Indices in the request's tokens."""
    first_position: int
    page_starts: list[int]
    """First slot of page 0, 1, ... up to the rows' own page."""


@dataclass(slots=True)
class HostPlan:
    """What `Planner.add` collects. `row_of[i][j]`: row of the step that token j of request i has."""

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    groups: list[_Group] = field(default_factory=list)
    copies: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)


class Planner:
    """Lays out one step. `row_multiple`: the number of rows is rounded up to a multiple of it."""

    def __init__(self, pool: PagedPool, row_multiple: int = 1) -> None:
        self._pool = pool
        self._scratch = Scratch(pool)
        self._row_multiple = row_multiple
        self.host = HostPlan()

    def add(
        self,
        cache: PagedCache,
        token_ids: Sequence[int],
        parents: Sequence[int],
        depths: Sequence[int],
        logit_rows: Sequence[int],
    ) -> None:
        """Lay out one request's tokens and make them the cache's pending ones. The cache has room for all of them."""
        host, length = self.host, cache.length
        cache.pending = Pending(parents, None)
        slots = cache.slots(length, length + len(token_ids))
        row_of: dict[int, int] = {}
        groups = self._chain(cache, len(token_ids)) if is_chain(depths) else self._tree(cache, parents, depths, slots)
        for group in groups:
            for node in group.rows:
                row_of[node] = len(host.token_ids)
                host.token_ids.append(token_ids[node])
                host.positions.append(length + depths[node])
                host.slots.append(int(slots[node]))
            host.groups.append(group)
        host.logit_rows += [row_of[row] for row in logit_rows]

    def _chain(self, cache: PagedCache, count: int) -> Iterator[_Group]:
        starts = [page * PAGE_SLOTS for page in cache.pages]
        for page, rows in _by_page(range(count), [cache.length + index for index in range(count)]):
            yield _Group(rows, cache.length + rows[0], starts[: page + 1])

    def _tree(
        self, cache: PagedCache, parents: Sequence[int], depths: Sequence[int], slots: np.ndarray
    ) -> Iterator[_Group]:
        length, first_touched = cache.length, cache.length // PAGE_SLOTS
        starts = [page * PAGE_SLOTS for page in cache.pages[:first_touched]]
        for path, new in paths(parents):
            touched: list[int] = []
            for page in range(first_touched, (length + depths[path[-1]]) // PAGE_SLOTS + 1):
                begin, end = page * PAGE_SLOTS, min((page + 1) * PAGE_SLOTS, length + len(path))
                committed = cache.slots(begin, max(begin, min(end, length)))
                own = slots[path[max(0, begin - length) : max(0, end - length)]]
                sources = np.concatenate((committed, own))
                touched.append(self._scratch.take(len(sources)))
                self.host.copies.append((sources, np.arange(touched[-1], touched[-1] + len(sources))))
            for page, rows in _by_page(new, [length + depths[node] for node in new]):
                pages = [*starts, *touched[: page - first_touched + 1]]
                yield _Group(rows, length + depths[rows[0]], pages)

    def finish(self, exact: bool) -> tuple[Sizes, np.ndarray]:
        """The sizes and the integers to upload. `exact`: round nothing up, for steps that no graph is kept for."""
        host, count = self.host, len(self.host.token_ids)
        copies = sum(len(sources) for sources, _ in host.copies)
        most_pages = max(len(group.page_starts) - 1 for group in host.groups)
        waves = -(-most_pages // WAVE_PAGES)
        pages = min(most_pages, WAVE_PAGES)
        # One group more than there are: it takes the padding rows.
        most_rows = max(len(group.rows) for group in host.groups)
        sizes = Sizes(count, len(host.groups) + 1, most_rows, pages, waves, copies, len(host.logit_rows))
        if not exact:
            sizes = Sizes(
                _round_rows(count),
                _power(sizes.groups),
                _power(most_rows),
                _power(pages),
                waves,
                _power(copies),
                _round_rows(sizes.logit_rows),
            )
        sizes = replace(sizes, rows=round_up(sizes.rows, self._row_multiple))
        return sizes, self._pack(sizes)

    def _pack(self, sizes: Sizes) -> np.ndarray:
        host, trash = self.host, self._pool.trash
        counts = [len(group.rows) for group in host.groups]
        counts.append(sizes.rows - sum(counts))
        counts += [0] * (sizes.groups - len(counts))
        boundaries = np.concatenate(([0], np.cumsum(counts)))
        own = np.full((3, sizes.groups), [[trash], [1], [0]], dtype=np.int64)
        for index, group in enumerate(host.groups):
            own[:, index] = (
                group.page_starts[-1],
                group.first_position % PAGE_SLOTS + len(group.rows),
                group.first_position // PAGE_SLOTS * PAGE_SLOTS,
            )
        parts = [
            _padded(host.token_ids, sizes.rows, 0),
            _padded(host.positions, sizes.rows, 0),
            _padded(host.slots, sizes.rows, trash),
            np.repeat(np.arange(sizes.groups), counts),
            _padded(host.logit_rows, sizes.logit_rows, 0),
            _padded([slot for sources, _ in host.copies for slot in sources], sizes.copies, trash),
            _padded([slot for _, targets in host.copies for slot in targets], sizes.copies, trash),
            boundaries,
            np.append(own[0], 0),
            own[1],
            own[2],
        ]
        for wave in range(sizes.waves):
            starts = np.full((sizes.pages, sizes.groups), trash, dtype=np.int64)
            used = np.zeros((sizes.pages, sizes.groups), dtype=np.int64)
            for index, group in enumerate(host.groups):
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
    at = 0

    def next_part(count: int) -> Tensor:
        nonlocal at
        at += count
        return packed[at - count : at]

    rows, groups, pairs = sizes.rows, sizes.groups, sizes.pages * sizes.groups
    token_ids, positions, slots, group_of_row = (next_part(rows) for _ in range(4))
    logit_rows, copy_from, copy_to = next_part(sizes.logit_rows), next_part(sizes.copies), next_part(sizes.copies)
    cu_rows, cu_keys, used = (next_part(count).to(torch.int32) for count in (groups + 1, groups + 1, groups))
    first_position = next_part(groups)
    waves = []
    for wave in range(sizes.waves):
        parts = [next_part(count).to(torch.int32) for count in (pairs + 1, pairs + 1, pairs)]
        waves.append(Wave(parts[0], parts[1], parts[2], wave * WAVE_PAGES))
    return DevicePlan(
        sizes,
        token_ids,
        positions,
        slots,
        group_of_row,
        logit_rows,
        copy_from,
        copy_to,
        cu_rows,
        cu_keys,
        used,
        first_position,
        tuple(waves),
    )


def _by_page(nodes: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """Consecutive nodes of one page each, with the page's index."""
    rows: list[int] = []
    page = -1
    for node, position in zip(nodes, positions, strict=True):
        if rows and position // PAGE_SLOTS != page:
            yield page, rows
            rows = []
        page = position // PAGE_SLOTS
        rows.append(node)
    if rows:
        yield page, rows


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
