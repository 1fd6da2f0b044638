"""Find the sequences of a step whose queries pass over leading blocks of the cache together, from the block tables.

Sequences that begin in the same blocks form a group; groups nest, as prompts share beginnings of several lengths
(Hydragen, Juravsky et al., 2024; several levels as in FlashInfer's cascade). How much makes a group worth it, and in
what units its end is counted, each device says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchinfer_kernels.step_tables import StepTables

Ints = NDArray[np.int64]
FEWEST_COLUMNS = 8
# Odd, so that no power of it is 0 (Knuth's multiplicative hashing)
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Worth:
    """The least that is worth a group: a number of sequences, and of units that they share beyond the group around
    it."""

    sequences: int
    units: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences that share units [first, end) of their caches. Around it are `level` groups, which share less."""

    sequences: Ints
    first: int
    end: int
    level: int


def prefix_groups(
    query_lens: Sequence[int] | Ints,
    context_lens: Sequence[int] | Ints,
    tables: StepTables,
    block_size: int,
    units: Callable[[Ints], Ints],
    worth: Worth,
    most_queries: int = 1,
) -> list[PrefixGroup]:
    """The groups of the sequences that have `most_queries` or fewer, outer ones before inner ones.

    tables: of the S sequences; `units`: how many whole units lie in a number of leading blocks. The widest group is
    taken first, and the groups inside it are measured from its end. So of the units that a sequence shares with
    `worth.sequences` - 1 others, before all their queries, fewer than `worth.units` are left to it alone.
    """
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    few = np.flatnonzero((lens <= most_queries) & (contexts - lens >= block_size))
    if len(few) < worth.sequences or _all_differ(tables.leading(few, 1)[:, 0]):
        return []
    full = (contexts[few] - lens[few]) // block_size  # blocks that lie before the queries
    own = tables.leading(few, _columns(tables, few, full))
    # What comes after them sorts behind every block: sequences between two that share blocks have these, too
    rows = np.where(np.arange(own.shape[1]) < full[:, None], own, -1).astype(">i4")
    by_blocks = np.argsort(rows.view(f"V{rows.shape[1] * 4}")[:, 0], kind="stable")
    rows, full = rows[by_blocks], full[by_blocks]
    differ = np.ones((len(rows) - 1, rows.shape[1] + 1), bool)  # the last column: where all are the same
    np.not_equal(rows[1:], rows[:-1], out=differ[:, :-1])
    same = differ.argmax(1)
    shared = units(np.minimum(same, np.minimum(full[1:], full[:-1])))
    return list(_nested(few[by_blocks], shared, worth))


def _columns(tables: StepTables, few: Ints, full: Ints) -> int:
    """Return a number of leading blocks of which no two sequences share more; looking at the others would cost time.
    Sums of products stand for beginnings, as two equal beginnings have the same sum."""
    most = int(np.partition(full, -2)[-2])
    columns = FEWEST_COLUMNS
    while columns < most:
        factors = _FACTOR ** np.arange(columns, dtype=np.uint64)
        sums = tables.leading(few, columns).astype(np.uint64) @ factors
        if _all_differ(sums):
            return columns
        columns *= 2
    return most


def _all_differ(values: NDArray[Any]) -> bool:
    """Return whether no two values (n,) are equal. np.unique takes several times as long."""
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()


def _nested(order: Ints, shared: Ints, worth: Worth) -> Iterator[PrefixGroup]:
    """Groups among the sorted sequences, depth first. shared[i]: units that sequences i and i + 1 share."""
    # [start, end) of sequences, the units that they share with one another and that are taken, and the level
    ranges = [(0, len(order), 0, 0)]
    while ranges:
        start, end, taken, level = ranges.pop()
        if end - start < worth.sequences:
            continue
        inside = shared[start : end - 1]
        common = int(inside.min())
        if common >= taken + worth.units:
            yield PrefixGroup(order[start:end], taken, common, level)
            taken, level = common, level + 1
        else:
            common = taken + worth.units - 1
        cuts = (np.flatnonzero(inside <= common) + start + 1).tolist()
        parts = list(zip((start, *cuts), (*cuts, end), strict=True))
        ranges += [(left, right, taken, level) for left, right in reversed(parts)]
