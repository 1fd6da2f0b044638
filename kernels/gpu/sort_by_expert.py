"""One kernel that puts rows, one for each token and choice, in the order of their experts.

A program has an expert. It knows from the numbers of rows where its own begin, reads all choices, and puts those of its
own one after the other, in the tokens' order. So nothing waits for another program, and the host for nothing; all
choices of a step fit the L2 cache, which is where all but the first program read them. Where tiles of rows end is
written for every height that products use, so that these need not compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gpu.sizes import next_power_of_2

# Choices that a program reads at once: 8 a thread
BLOCK, WARPS = 2048, 8
LEAST_HEIGHT, HEIGHTS = (
    16,
    5,
)  # rows of the lowest tile, and how many heights there are, each twice the one before

NOWHERE = -1  # the place of a row that is none of those that are sorted


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """Rows sorted by expert; rows of an expert stand in the tokens' order."""

    tokens: Tensor  # (R,) int64: the token of each
    places: Tensor  # (R,) int64: where the row of token × chosen + choice stands, or NOWHERE
    starts: Tensor  # (experts + 1,) int64: where each expert's rows begin
    ends: Tensor  # (HEIGHTS, experts) int64: tiles of each height that an expert and those before it have


@triton.jit(do_not_specialize=["rows"])  # one a token and expert of a step
def _sort_kernel(
    experts_ptr, counts_ptr, counted_ptr, loads_ptr,  # counted: whether a token's rows count; None: all do
    tokens_ptr, places_ptr, starts_ptr, ends_ptr,
    rows, chosen, experts,
    LEAST_HEIGHT: tl.constexpr, HEIGHTS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert, number = tl.program_id(0), tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + number, mask=number < experts, other=0)
    if expert == 0:
        tl.store(starts_ptr, tl.zeros((), tl.int64))
        tl.store(starts_ptr + 1 + number, tl.cumsum(counts, 0).to(tl.int64), mask=number < experts)
        for power in tl.static_range(HEIGHTS):
            ends = tl.cumsum((counts + ((LEAST_HEIGHT << power) - 1)) // (LEAST_HEIGHT << power), 0)
            tl.store(ends_ptr + power * experts + number, ends.to(tl.int64), mask=number < experts)
    place = tl.sum(tl.where(number < expert, counts, 0), 0)
    own = tl.sum(tl.where(number == expert, counts, 0), 0)
    load = tl.zeros((BLOCK,), tl.int32)
    end, first = place + own, 0
    while (first < rows) & (place < end):  # behind an expert's last row there is nothing for it
        row = first + tl.arange(0, BLOCK)
        mine = (tl.load(experts_ptr + row, mask=row < rows, other=-1) == expert).to(tl.int32)
        to = place + tl.cumsum(mine, 0) - 1
        tl.store(tokens_ptr + to, (row // chosen).to(tl.int64), mask=mine > 0)
        tl.store(places_ptr + row, to.to(tl.int64), mask=mine > 0)
        if counted_ptr is not None:
            load += tl.load(counted_ptr + row // chosen, mask=mine > 0, other=0).to(tl.int32)
        else:
            load += mine
        place += tl.sum(mine, 0)
        first += BLOCK
    tl.store(loads_ptr + expert, tl.load(loads_ptr + expert) + tl.sum(load, 0))


def sort_by_expert(choice: Choice, loads: Tensor, counted: Tensor | None = None) -> ExpertRows:
    """Sort each token's choices, and add how many each expert has to `loads` (experts,) int64; with `counted` (T,) bool
    those of these tokens alone. The choice's experts have to be below the number of loads; where it comes without
    counts, one may be that number: no expert, whose row is none of those that are sorted, and is NOWHERE."""
    experts, count = choice.experts.contiguous(), len(loads)
    rows, device = experts.numel(), experts.device
    counts = _counts(experts, count) if choice.counts is None else choice.counts
    if counts.shape != loads.shape:
        raise ValueError(f"{tuple(counts.shape)} counts of experts, and loads of {tuple(loads.shape)}")
    tokens, places = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    if choice.counts is None:  # what no expert has is not written
        tokens.zero_()
        places.fill_(NOWHERE)
    starts = torch.empty(count + 1, dtype=torch.int64, device=device)
    ends = torch.empty(HEIGHTS, count, dtype=torch.int64, device=device)
    _sort_kernel[(count,)](
        experts, counts, counted, loads, tokens, places, starts, ends, rows, experts.shape[1], count,
        LEAST_HEIGHT=LEAST_HEIGHT, HEIGHTS=HEIGHTS, EXPERTS=next_power_of_2(count),
        BLOCK=min(BLOCK, max(128, next_power_of_2(rows))), num_warps=WARPS,
    )  # fmt: skip
    return ExpertRows(tokens, places, starts, ends)


def _counts(experts: Tensor, count: int) -> Tensor:
    ones = torch.ones_like(experts, dtype=torch.int32).flatten()
    counts = torch.zeros(count + 1, dtype=torch.int32, device=experts.device)
    return counts.index_add_(0, experts.flatten(), ones)[:count]
