"""Paged attention by torch's own variable-length kernel, page by page, and its reference in plain operations.

`torch.nn.attention.varlen.varlen_attn` of torch 2.13 takes block tables only with FlashAttention 3, which torch does
not ship. What it ships (FlashAttention 2) takes the first key of each sequence from `cu_seq_k` and, with `seqused_k`,
the number of keys from there, so that sequences may lie anywhere in one tensor of keys. So here every pair of a group
of rows and a page is a sequence; a row's results over its pages are joined by their log-sum-exp. This also splits long
contexts over the device, and as neither the portions nor the order in which they are joined depend on batch-mates, a
row's attention rounds the same whatever its batch-mates are.

`varlen_attn` itself has never been run on a GPU by this project (see lab.bench.gpu_check); `plain_pages` computes the
same from the same arguments on any device and is what tests compare with transformers' models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from moot.model.cache.contiguous import PAGE_SLOTS
from moot.model.gpu.plan import DevicePlan, Wave

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_KERNEL_HEAD_DIM = 256


def kernel_supports(dtype: torch.dtype, device: torch.device, head_dim: int) -> bool:
    return device.type == "cuda" and dtype in KERNEL_DTYPES and head_dim <= MAX_KERNEL_HEAD_DIM and head_dim % 8 == 0


class PagedAttention:
    """Attention over pages. `use_kernel`: torch's variable-length kernel, else plain operations. Sliding windows always
    take the latter: where a window begins differs from row to row, which the kernel cannot be told for a page before
    the rows' own. `kernel`: takes the arguments of `varlen_attn`, and stands in for it where there is no GPU."""

    def __init__(self, use_kernel: bool, scaling: float, kernel: Callable[..., Any] = varlen_attn) -> None:
        self.use_kernel = use_kernel
        self._kernel = kernel
        self._scaling = scaling

    def __call__(self, query: Tensor, kv: Tensor, plan: DevicePlan, window: int | None) -> Tensor:
        """Attention of a step's rows, [rows, heads, dim]. query [rows, heads, dim], kv [2, slots, kv_heads, dim] with
        the rows' own in place."""
        output, log_total = self._own_pages(query, kv, plan, window)
        if not plan.waves:
            return output
        joined = output.to(log_total.dtype)
        for wave in plan.waves:
            found, lse = self._earlier_pages(query, kv, plan, wave, window)
            joined, log_total = join(
                torch.cat((joined[None], found.to(joined.dtype))), torch.cat((log_total[None], lse))
            )
        return joined.to(query.dtype)

    def _by_kernel(
        self, query: Tensor, kv: Tensor, cu_rows: Tensor, pages: DevicePlan | Wave, most_rows: int, **how: Any
    ) -> tuple[Tensor, Tensor]:
        """Results and log-sum-exp of `query`, cut into sequences by `cu_rows`, each over its page."""
        return self._kernel(
            query,
            kv[0],
            kv[1],
            cu_rows,
            pages.cu_keys,
            # A kernel of its own serves queries of length 1: never asked for, or one row would round in another way.
            max(2, most_rows),
            PAGE_SLOTS,
            return_aux=AuxRequest(lse=True),
            scale=self._scaling,
            seqused_k=pages.used,
            **how,
        )

    def _own_pages(self, query: Tensor, kv: Tensor, plan: DevicePlan, window: int | None) -> tuple[Tensor, Tensor]:
        """Results [rows, heads, dim] and log-sum-exp [rows, heads] of each row over its own page."""
        if self.use_kernel and window is None:
            grouped = query.shape[1] != kv.shape[2]
            output, log_total = self._by_kernel(
                query, kv, plan.cu_rows, plan, plan.sizes.group_rows, window_size=(-1, 0), enable_gqa=grouped
            )
            return output, log_total.transpose(0, 1)
        rows = Rows.of(query, plan)
        own = plain_pages(rows, kv, plan.cu_keys[:-1], plan.first_position, plan.used, window, self._scaling)
        return rows.back(own[0]).to(query.dtype), rows.back(own[1])

    def _earlier_pages(
        self, query: Tensor, kv: Tensor, plan: DevicePlan, wave: Wave, window: int | None
    ) -> tuple[Tensor, Tensor]:
        """Results [pages, rows, heads, dim] and log-sum-exp [pages, rows, heads] of each row over one wave of pages."""
        rows, heads, dim = query.shape
        pages, kv_heads = plan.sizes.pages, kv.shape[2]
        shared = heads // kv_heads
        used = wave.used.view(pages, -1)[:, plan.group_of_row]  # [pages, rows]
        if self.use_kernel and window is None:
            # Query heads that share keys become rows of one query: nothing is masked by row here.
            packed = query.view(rows, kv_heads, shared, dim).transpose(1, 2).reshape(rows * shared, kv_heads, dim)
            output, lse = self._by_kernel(
                packed.repeat(pages, 1, 1), kv, wave.cu_rows * shared, wave, plan.sizes.group_rows * shared
            )
            output = output.view(pages, rows, shared, kv_heads, dim).transpose(2, 3).reshape(pages, rows, heads, dim)
            lse = lse.view(kv_heads, pages, rows, shared).permute(1, 2, 0, 3).reshape(pages, rows, heads)
        else:
            grouped = Rows.of(query, plan)
            starts, lengths = wave.cu_keys[:-1].view(pages, -1), wave.used.view(pages, -1)
            parts = []
            for page in range(pages):
                first = torch.full_like(plan.first_position, (wave.first_page + page) * PAGE_SLOTS)
                part = plain_pages(grouped, kv, starts[page], first, lengths[page], window, self._scaling)
                parts.append((grouped.back(part[0]), grouped.back(part[1])))
            output, lse = torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
        return output, lse.masked_fill((used == 0)[:, :, None], -torch.inf)


def join(outputs: Tensor, log_totals: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over several portions of keys from that over each: [portions, rows, heads, dim], [portions, ...].

    A portion's share is the exponential of its log-sum-exp; one without keys has -inf.
    """
    total = log_totals.logsumexp(0)
    shares = (log_totals - total).exp()
    outputs = outputs.masked_fill((log_totals == -torch.inf)[..., None], 0.0)
    return (outputs * shares[..., None]).sum(0), total


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's rows by group, each group padded to plan.sizes.group_rows, two at least, by repeating its last row."""

    query: Tensor  # [groups, group_rows, heads, dim]
    positions: Tensor  # [groups, group_rows]
    group_of_row: Tensor
    row_in_group: Tensor

    @classmethod
    def of(cls, query: Tensor, plan: DevicePlan) -> Rows:
        first, end = plan.cu_rows[:-1, None], plan.cu_rows[1:, None]
        # One row alone would go through a product of its own, which rounds in another way.
        numbers = torch.arange(max(2, plan.sizes.group_rows), device=query.device)
        index = torch.minimum(first + numbers, (end - 1).clamp_min(0))
        in_group = torch.arange(query.shape[0], device=query.device) - plan.cu_rows[plan.group_of_row]
        return cls(
            query[index], plan.positions[index], plan.group_of_row, in_group.clamp_max(plan.sizes.group_rows - 1)
        )

    def back(self, grouped: Tensor) -> Tensor:
        """Values by group, [groups, group_rows, ...], as rows of the step."""
        return grouped[self.group_of_row, self.row_in_group]


def plain_pages(
    rows: Rows, kv: Tensor, starts: Tensor, first_positions: Tensor, used: Tensor, window: int | None, scaling: float
) -> tuple[Tensor, Tensor]:
    """Each group's rows against one page: used[g] slots from starts[g] on, at positions from first_positions[g] on;
    a row sees those up to its own position and inside the window.

    Returns [groups, group_rows, heads, dim] and the log-sum-exp [groups, group_rows, heads], float32 (float64 of
    float64): -inf without a key.
    """
    groups, count, heads, dim = rows.query.shape
    kv_heads = kv.shape[2]
    offsets = torch.arange(PAGE_SLOTS, device=kv.device)
    is_used = offsets < used[:, None]
    # What lies behind the used slots may be anything, even NaN, whose product with a weight of 0 would be NaN: the
    # first slot stands for them. A page of which nothing is used is left out by `join`.
    slots = torch.where(is_used, starts[:, None] + offsets, starts[:, None])
    exact = torch.float64 if kv.dtype is torch.float64 else torch.float32
    keys, values = (side[slots].to(exact) for side in kv)
    query = rows.query.to(exact).view(groups, count, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("grkhd,gskd->gkhrs", query, keys) * scaling
    at = (first_positions[:, None] + offsets)[:, None]  # [groups, 1, 512]
    seen = is_used[:, None] & (at <= rows.positions[:, :, None])
    if window is not None:
        seen &= at > rows.positions[:, :, None] - window
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    log_total = scores.logsumexp(-1)  # [groups, kv_heads, shared, rows]
    weights = (scores - log_total[..., None]).exp().masked_fill(~seen[:, None, None], 0.0)
    output = torch.einsum("gkhrs,gskd->grkhd", weights, values)
    return output.reshape(groups, count, heads, dim), log_total.permute(0, 3, 1, 2).reshape(groups, count, heads)
