"""A kernel that sorts rows, one per token and chosen expert, by expert.

Each program handles one expert. It computes the first row of the expert from the counts, reads all choices, and writes
its own in the order of tokens. No program waits for another, and the host does not synchronise. The choices of a step
fit the L2 cache, from which all programs except the first read them. The ends of the row tiles are also written, for
each tile height that products use.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gpu.sizes import next_power_of_2

# Choices that a program reads at a time: 8 per thread
BLOCK, WARPS = 2048, 8
LEAST_HEIGHT, HEIGHTS = 16, 5  # rows of the lowest tile, and the number of heights, which double each time

NOWHERE = -1  # the place of a row that is not sorted, because it has no expert


@dataclass(frozen=True, slots=True, eq=False)
class ExpertRows:
    """The rows of a step, one per token and chosen expert, sorted by expert and then by token: R in all.

    Attributes:
        tokens: (R,) int64, the token of each sorted row.
        places: (R,) int64, places[token × experts per token + choice] is the index of that choice's sorted row;
            NOWHERE: the choice has no expert.
        starts: (experts + 1,) int64, the first sorted row of each expert, and at the end the number of sorted rows.
        ends: (HEIGHTS, experts) int64, for each tile height, the cumulative number of row tiles up to each expert. The
            first height is LEAST_HEIGHT rows; each further height is twice the one before.
    """

    tokens: Tensor
    places: Tensor
    starts: Tensor
    ends: Tensor


@triton.jit(do_not_specialize=["rows"])  # the number of rows differs between steps
def _sort_kernel(
    experts_ptr, counts_ptr, counted_ptr, loads_ptr,  # counted: True if a token adds to loads; None: all do
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
    while (first < rows) & (place < end):  # stop after the expert's last row
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
    """Sort the rows of a step by expert, and count them in `loads`. There is one row per token and chosen expert.

    Args:
        choice: the experts that each of T tokens uses, all below len(loads). If `choice.counts` is None, the expert
            len(loads) means no expert.
        loads: (experts,) int64; the number of rows of each expert is added to it.
        counted: (T,) bool, True for tokens whose rows are counted in `loads`; None: all are.
    """
    experts, count = choice.experts.contiguous(), len(loads)
    rows, device = experts.numel(), experts.device
    counts = _counts(experts, count) if choice.counts is None else choice.counts
    if counts.shape != loads.shape:
        raise ValueError(f"counts are {tuple(counts.shape)}, loads {tuple(loads.shape)}")
    tokens, places = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    if choice.counts is None:  # the kernel does not write rows without an expert
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
