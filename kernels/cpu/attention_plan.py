"""Plan which query rows pass over which tiles of the paged KV cache together, once a step; every layer reads the plan.

A step's queries are cut into items: rows of one sequence that walk its block table, as many as fit a core's cache.
The few queries of sequences that share leading blocks (`prefix_groups`) pass over those together, level after level:
each prefix is then read once for its whole group, as one matrix product. In between a row keeps its maximum, mass and
weighted sum.
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
from batchinfer_kernels.prefix_groups import Ints, PrefixGroup, Worth, prefix_groups
from batchinfer_kernels.step_tables import StepTables

MAX_ROWS = 48  # the least that MOST_ROWS in operators.h is
TO_THE_END = -1
# Keeping a row's state costs about as much as passing over half a tile.
LEAST_SHARED_TILES = 2
LEAST_SHARERS = 3
# Queries of a sequence that passes over shared blocks with others: one, and drafts. Those of prompts fill items alone.
MOST_QUERIES = 16
_ITEM = 7  # first row, rows, sequence, first tile, end tile, starts, ends


@dataclass(frozen=True, slots=True)
class CachePages:
    """Blocks are cut into units of a vector's lanes, and units joined to tiles; tile 0 starts at token 0."""

    block_size: int
    lanes: int
    units_per_tile: int

    def whole_tiles(self, blocks: Ints) -> Ints:
        """Return how many tiles lie within a number of leading blocks."""
        return blocks * -(-self.block_size // self.lanes) // self.units_per_tile


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """The work items that `paged_attention` goes through."""

    items: Tensor  # (n, 7) int64
    level_ends: Tensor  # (levels,) int64
    levels: int
    rows: Tensor  # (R, 2) int64: token of the step, position; items name stretches of it
    group: int  # query heads a KV head
    # (R,) int64: the last position up to which each row sees all; None: its own
    last_seen: Tensor | None = None
    behind: Tensor | None = (
        None  # (R,) int32: which keys behind that it sees, as a TreeMask has them; None: none
    )

    def structure(self, tables: Tensor, group: int) -> PlanStructure:
        """Return the items as the operators take them; tables: (S, blocks) int32, the step's. Both must outlive it.
        Raises ValueError where the items were cut for another group."""
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
    """Items of a step of S sequences; `group` query heads share a KV head.

    With `tables` (S, blocks) and `pages`, few queries pass over shared blocks together. The longest items come
    first, so that no thread is left alone with one at the end. `most_rows`: queries times `group` that an item may
    have, as the operators say. `tree`: which keys queries see, where some are in trees of drafts. Raises ValueError for
    a group larger than MAX_ROWS.
    """
    if group > MAX_ROWS:
        raise ValueError(f"{group} query heads share a KV head; at most {MAX_ROWS} may")
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    ends = np.cumsum(lens)
    groups = _shared(lens, contexts, tables, pages)
    # Of each sequence the first tile and the level that are its own
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
    """Return the items of a step of whole sequences of these lengths, whose tokens see one another, also later ones.
    Raises as `attention_items` does."""
    planned = attention_items(lens, lens, group, most_rows=most_rows)
    last = np.repeat(np.asarray(lens, np.int64) - 1, lens)
    return replace(planned, last_seen=torch.from_numpy(last))


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


def _queries(lens: Ints, ends: Ints, sequences: Ints) -> Ints:
    """Return the numbers of the queries of these sequences, one sequence after the other."""
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
) -> list[PrefixGroup]:
    """Return the keys that few queries of several sequences share, counted in tiles."""
    if tables is None or pages is None:
        return []
    worth = Worth(LEAST_SHARERS, LEAST_SHARED_TILES)
    blocks = StepTables.of(tables)
    return prefix_groups(lens, contexts, blocks, pages.block_size, pages.whole_tiles, worth, MOST_QUERIES)
