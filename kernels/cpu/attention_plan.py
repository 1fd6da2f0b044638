"""Plans once per step which queries read which tiles of the paged KV cache together; all layers use the plan.

The queries of a step are split into items: queries of one sequence that read its blocks together, sized for a core's
cache. Sequences with few queries that share leading blocks (`prefix_groups`) read these together, level by level, in
one matrix product per group. Between levels each row keeps its maximum, its sum of weights and its weighted sum of V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.cpu.structures import PlanStructure, address
from batchinfer_kernels.draft_tree import TreeMask
from batchinfer_kernels.prefix_groups import GroupMinimum, Ints, PrefixGroup, prefix_groups
from batchinfer_kernels.step_tables import StepTables

MAX_ROWS = 48  # the smallest value of MOST_ROWS in operators.h on any CPU
TO_THE_END = -1  # as end tile: the sequence's last tile
# Storing and loading a row's state costs about the time of reading half a tile
LEAST_SHARED_TILES = 2
LEAST_SHARERS = 3
# Most queries of a sequence in a group: a decoded token and its drafts. Prefill queries fill an item of their own
MAX_QUERIES = 16
_ITEM = 7  # fields: first row, rows, sequence, first tile, end tile, starts, ends


@dataclass(frozen=True, slots=True)
class CachePages:
    """How attention divides a paged cache into tiles, the keys that it reads at a time.

    Each block is split into units, and consecutive units of a sequence are joined to tiles.

    Attributes:
        block_size: number of tokens of a block.
        lanes: number of tokens of a unit; the last unit of a block may be shorter.
        units_per_tile: number of units of a tile.
    """

    block_size: int
    lanes: int
    units_per_tile: int

    def whole_tiles(self, blocks: Ints) -> Ints:
        """Return the number of whole tiles in the first n blocks of a sequence, for each n in `blocks`."""
        return blocks * -(-self.block_size // self.lanes) // self.units_per_tile


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The work items of attention in one step, for the compiled CPU operators.

    A work item is a range of rows and the tiles of keys that they read. A row is a query; a query that reads shared and
    own keys is several rows. Items are computed in levels: first items over keys that sequences share, then items over
    each sequence's own keys.

    Attributes:
        items: (n, 7) int64: first row, number of rows, sequence whose blocks are read, first tile, end tile (exclusive,
            -1: the sequence's end), 1 if the item has the first tiles of its rows, 1 if it has their last tiles.
        level_ends: (levels,) int64, the index after the last item of each level.
        levels: number of levels.
        rows: (R, 2) int64, for each row the index of its token in the step, and its position in the sequence.
        group: number of query heads per KV head.
        last_seen: (R,) int64, each row sees all keys up to this position; None: up to its own.
        behind: (R,) int32, `TreeMask.bits` of each row: which keys after `last_seen` it sees; None: none.
    """

    items: Tensor
    level_ends: Tensor
    levels: int
    rows: Tensor
    group: int
    last_seen: Tensor | None = None
    behind: Tensor | None = None

    def structure(self, tables: Tensor, group: int) -> PlanStructure:
        """Return the work items as a C structure, which points to the tensors: they must outlive it.

        Args:
            tables: (S, blocks) int32, the block tables of the step.
            group: number of query heads per KV head of the layer.

        Raises:
            ValueError: If the items were planned for another `group`.
        """
        if group != self.group:
            raise ValueError(f"items planned for {self.group} query heads a KV head, used with {group}")
        items, ends, rows = (tensor.data_ptr() for tensor in (self.items, self.level_ends, self.rows))
        seen = address(self.last_seen), address(self.behind)
        return PlanStructure(tables.data_ptr(), tables.shape[1], items, ends, self.levels, rows, *seen)


def attention_items(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    group: int,
    tables: NDArray[np.int32] | None = None,
    pages: CachePages | None = None,
    most_rows: int = MAX_ROWS,
    tree: TreeMask | None = None,
) -> Items:
    """Return the work items of attention in a step of S sequences.

    Args:
        query_lens: number of query tokens of each sequence.
        context_lens: number of cached tokens of each sequence, queries included.
        group: number of query heads per KV head.
        tables: (S, blocks) block tables, to find blocks that several sequences share: they are read once for all
            sequences with few queries. None: each sequence reads all its keys.
        pages: how attention divides the cache into tiles; required with `tables`.
        most_rows: maximum of queries × `group` in an item; see `CompiledOperators.most_rows`.
        tree: the keys that queries in draft trees see; None: there are no draft trees.

    Raises:
        ValueError: If `group` exceeds MAX_ROWS.
    """
    if group > MAX_ROWS:
        raise ValueError(f"{group} query heads share a KV head; at most {MAX_ROWS} are supported")
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    ends = np.cumsum(lens)
    groups = _shared(lens, contexts, tables, pages)
    # The first tile and the level of each sequence that it does not share
    depth = np.zeros((len(lens), 2), np.int64)
    for shared in groups:
        depth[shared.sequences] = (shared.end, shared.level + 1)
    tokens = np.arange(int(lens.sum()))
    row_of = np.repeat(np.arange(len(lens)), lens)
    rows = np.stack((tokens, tokens - (ends - contexts)[row_of]), 1)
    most = max(1, most_rows // group)
    levels = max((shared.level + 1 for shared in groups), default=0)
    found = [_own_items(lens, ends - lens, depth[:, 0], most)]
    found_level = [depth[found[0][:, 2], 1]]
    for shared in groups:
        first_row, own = len(rows), _queries(lens, ends, shared.sequences)
        rows = np.concatenate((rows, rows[own]))
        found.append(_group_items(shared, first_row, len(own), most))
        found_level.append(np.full(len(found[-1]), shared.level))
    items = _ordered(np.concatenate(found), np.concatenate(found_level), rows, levels, group)
    if tree is None:
        return items
    last, bits = (torch.from_numpy(each[rows[:, 0]]) for each in (tree.last, tree.bits))
    return replace(items, last_seen=last, behind=bits)


def whole_items(lens: Sequence[int], group: int, most_rows: int = MAX_ROWS) -> Items:
    """Return the work items of bidirectional attention: each token of a sequence sees all its tokens.

    Args:
        lens: number of tokens of each sequence; the step computes all of them.
        group: number of query heads per KV head.
        most_rows: maximum of queries × `group` in an item.

    Raises:
        ValueError: If `group` exceeds MAX_ROWS.
    """
    planned = attention_items(lens, lens, group, most_rows=most_rows)
    last = np.repeat(np.asarray(lens, np.int64) - 1, lens)
    return replace(planned, last_seen=torch.from_numpy(last))


def _own_items(lens: Ints, starts: Ints, first_tiles: Ints, most: int) -> Ints:
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


def _queries(lens: Ints, ends: Ints, sequences: Ints) -> Ints:
    counts = lens[sequences]
    if counts.max() == 1:
        return (ends - 1)[sequences]
    behind = np.cumsum(counts)
    return np.arange(behind[-1]) + np.repeat(ends[sequences] - behind, counts)


def _group_items(shared: PrefixGroup, first_row: int, count: int, most: int) -> Ints:
    starts = np.arange(0, count, most)
    items = np.empty((len(starts), _ITEM), np.int64)
    items[:, 0] = first_row + starts
    items[:, 1] = np.minimum(most, count - starts)
    items[:, 2:] = (shared.sequences[0], shared.first, shared.end, int(shared.first == 0), 0)
    return items


def _ordered(items: Ints, level: Ints, rows: Ints, levels: int, group: int) -> Items:
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
) -> list[PrefixGroup]:
    if tables is None or pages is None:
        return []
    minimum = GroupMinimum(LEAST_SHARERS, LEAST_SHARED_TILES)
    blocks = StepTables.of(tables)
    return prefix_groups(lens, contexts, blocks, pages.block_size, pages.whole_tiles, minimum, MAX_QUERIES)
