"""Which query rows pass over which tiles of the paged KV cache together: planned once a step, read in every layer.

A step's queries are cut into items: rows of one sequence that walk its block table, as many as fit a core's cache.
Single queries of sequences that share leading blocks pass over those together, level after level down the tree of
shared prefixes (Hydragen, Juravsky et al., 2024; several levels as in FlashInfer's cascade): each prefix is then read
once for its whole group, as one matrix product. In between a row keeps its maximum, mass and weighted sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.cpu.structures import PlanStructure

MAX_ROWS = 48  # as MOST_ROWS in operators.h
TO_THE_END = -1
# Keeping a row's state costs about as much as passing over half a tile.
LEAST_SHARED_TILES = 2
LEAST_SHARERS = 3
_ITEM = 7  # first row, rows, sequence, first tile, end tile, starts, ends
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CachePages:
    """Blocks are cut into units of a vector's lanes, and units joined to tiles; tile 0 starts at token 0."""

    block_size: int
    lanes: int
    units_per_tile: int

    def whole_tiles(self, blocks: int) -> int:
        """How many tiles lie within so many leading blocks."""
        return blocks * -(-self.block_size // self.lanes) // self.units_per_tile


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """What `paged_attention` works through."""

    items: Tensor  # (n, 7) int64
    level_ends: Tensor  # (levels,) int64
    levels: int
    rows: Tensor  # (R, 2) int64: token of the step, position; items name stretches of it
    group: int  # query heads a KV head: an item's rows times these are at most MAX_ROWS

    def structure(self, tables: Tensor, group: int) -> PlanStructure:
        """For the operators; tables: (S, blocks) int32, the step's. Both must outlive it. Raises ValueError where the
        items were cut for another group."""
        if group != self.group:
            raise ValueError(f"items planned for {self.group} query heads a KV head, used with {group}")
        items, ends, rows = (tensor.data_ptr() for tensor in (self.items, self.level_ends, self.rows))
        return PlanStructure(tables.data_ptr(), tables.shape[1], items, ends, self.levels, rows)


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences [start, end) of the sorted order share their tiles [first, last)."""

    start: int
    end: int
    first: int
    last: int
    level: int


def attention_items(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    group: int,
    tables: NDArray[np.int32] | None = None,
    pages: CachePages | None = None,
) -> Items:
    """Items of a step of S sequences; `group` query heads share a KV head.

    With `tables` (S, blocks) and `pages`, single queries pass over shared blocks together. The longest items come
    first, so that no thread is left alone with one at the end. Raises ValueError for a group larger than MAX_ROWS.
    """
    if group > MAX_ROWS:
        raise ValueError(f"{group} query heads share a KV head; at most {MAX_ROWS} may")
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    ends = np.cumsum(lens)
    order, groups, depth = _shared(lens, contexts, tables, pages)
    tokens = np.arange(int(lens.sum()))
    row_of = np.repeat(np.arange(len(lens)), lens)
    rows = np.stack((tokens, tokens - (ends - contexts)[row_of]), 1)
    most = max(1, MAX_ROWS // group)
    levels = max((g.level + 1 for g in groups), default=0)
    found = [_own_items(lens, ends - lens, depth[:, 0], most)]
    found_level = [depth[found[0][:, 2], 1]]
    for g in groups:
        members = order[g.start : g.end]
        first_row = len(rows)
        rows = np.concatenate((rows, rows[(ends - 1)[members]]))
        found.append(_group_items(g, first_row, int(members[0]), most))
        found_level.append(np.full(len(found[-1]), g.level))
    return _ordered(np.concatenate(found), np.concatenate(found_level), rows, levels, group)


def _own_items(lens: Ints, starts: Ints, first_tiles: Ints, most: int) -> Ints:
    """Every sequence's queries, `most` at a time, from its first tile that no group has taken to its end."""
    pieces = -(-lens // most)
    sequence = np.repeat(np.arange(len(lens)), pieces)
    piece = np.arange(len(sequence)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    items = np.empty((len(sequence), _ITEM), np.int64)
    items[:, 0] = starts[sequence] + piece * most
    items[:, 1] = np.minimum(most, lens[sequence] - piece * most)
    items[:, 2] = sequence
    items[:, 3] = first_tiles[sequence]
    items[:, 4] = TO_THE_END
    items[:, 5] = first_tiles[sequence] == 0
    items[:, 6] = 1
    return items


def _group_items(group: _Group, first_row: int, sequence: int, most: int) -> Ints:
    members = group.end - group.start
    starts = np.arange(0, members, most)
    items = np.empty((len(starts), _ITEM), np.int64)
    items[:, 0] = first_row + starts
    items[:, 1] = np.minimum(most, members - starts)
    items[:, 2:] = (sequence, group.first, group.last, int(group.first == 0), 0)
    return items


def _ordered(items: Ints, level: Ints, rows: Ints, levels: int, group: int) -> Items:
    """Level after level, in each by falling size: rows times the last position."""
    size = items[:, 1] * rows[items[:, 0] + items[:, 1] - 1, 1]
    order = np.lexsort((-size, level))
    ends = np.searchsorted(level[order], np.arange(levels + 1), side="right")
    return Items(
        items=torch.from_numpy(np.ascontiguousarray(items[order])),
        level_ends=torch.from_numpy(ends.astype(np.int64)),
        levels=levels + 1,
        rows=torch.from_numpy(rows),
        group=group,
    )


def _shared(
    lens: Ints, contexts: Ints, tables: NDArray[np.int32] | None, pages: CachePages | None
) -> tuple[Ints, list[_Group], Ints]:
    """An order of the sequences in which sharers are adjacent, their groups, and for each sequence the first tile and
    the level that are left to it alone."""
    depth = np.zeros((len(lens), 2), np.int64)
    nothing: tuple[Ints, list[_Group], Ints] = (np.arange(0), [], depth)
    if tables is None or pages is None or len(lens) < LEAST_SHARERS or tables.shape[1] == 0:
        return nothing
    single = np.flatnonzero(lens == 1)
    if len(np.unique(tables[single, 0])) == len(single):
        return nothing
    order = single[np.argsort(_sortable(tables[single]), kind="stable")]
    full = (contexts[order] - 1) // pages.block_size  # blocks that lie before the query
    same = np.cumprod(tables[order[1:]] == tables[order[:-1]], 1).sum(1)
    same = np.minimum(same, np.minimum(full[1:], full[:-1]))
    tiles = np.array([pages.whole_tiles(int(blocks)) for blocks in same])
    groups = list(_groups(tiles, 0, len(order), 0, 0))
    for g in groups:  # outer groups come before inner ones
        depth[order[g.start : g.end]] = (g.last, g.level + 1)
    return order, groups, depth


def _sortable(tables: NDArray[np.int32]) -> NDArray[np.void]:
    """A row as one value: rows with equal beginnings are adjacent once sorted."""
    return np.ascontiguousarray(tables.astype(">i4")).view(f"V{tables.shape[1] * 4}")[:, 0]


def _groups(shared: Ints, start: int, end: int, taken: int, level: int) -> Iterator[_Group]:
    """Groups among the sorted sequences [start, end), which share at least `taken` tiles with one another.

    shared[i]: tiles that sequences i and i + 1 share. Depth first, outer before inner.
    """
    if end - start < LEAST_SHARERS:
        return
    inside = shared[start : end - 1]
    common = int(inside.min())
    if common >= taken + LEAST_SHARED_TILES:
        yield _Group(start, end, taken, common, level)
        taken, level = common, level + 1
    else:
        common = taken + LEAST_SHARED_TILES - 1
    cuts = np.flatnonzero(inside <= common) + start + 1
    for left, right in zip((start, *cuts.tolist()), (*cuts.tolist(), end), strict=True):
        yield from _groups(shared, left, right, taken, level)
