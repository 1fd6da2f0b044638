"""Finds groups of sequences that share leading KV blocks, which their queries then read once per group.

Groups nest, because prompts share prefixes of several lengths (Hydragen, Juravsky et al., 2024; FlashInfer's cascade).
Each device sets the smallest useful group and the unit in which shared prefixes are counted.
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
# Odd, hence no power of it is 0 modulo 2^64 (Knuth's multiplicative hashing)
_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class GroupMinimum:
    """The smallest group of sequences for which it is useful to read shared keys once.

    A unit is a number of keys that the caller chooses.

    Attributes:
        sequences: minimum number of sequences.
        units: minimum number of shared units that no enclosing group covers.
    """

    sequences: int
    units: int


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences with the same keys from unit `first` to unit `end`. A unit is a number of keys that the caller chooses.

    Attributes:
        sequences: indices of the sequences in the step.
        first: first shared unit that no enclosing group covers.
        end: end of the shared units, exclusive.
        level: number of groups that enclose this one.
    """

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
    minimum: GroupMinimum,
    most_queries: int = 1,
) -> list[PrefixGroup]:
    """Return groups of sequences whose first blocks are the same. An outer group comes before its inner groups.

    A group covers the longest prefix that all its sequences share. If some of them share more, an inner group covers
    the keys after this prefix.

    Args:
        query_lens: number of queries of each sequence.
        context_lens: number of keys of each sequence, queries included.
        tables: block tables of the sequences.
        block_size: number of tokens of a block.
        units: returns the number of whole units in the first n blocks, for an array of n.
        minimum: the smallest useful group.
        most_queries: maximum number of queries of a sequence; sequences with more are in no group.
    """
    lens, contexts = np.asarray(query_lens, np.int64), np.asarray(context_lens, np.int64)
    few = np.flatnonzero((lens <= most_queries) & (contexts - lens >= block_size))
    if len(few) < minimum.sequences or _all_differ(tables.leading(few, 1)[:, 0]):
        return []
    full = (contexts[few] - lens[few]) // block_size  # whole blocks before the queries
    own = tables.leading(few, _columns(tables, few, full))
    # Pad with -1, which as unsigned bytes sorts after every block: sequences that share a prefix become adjacent
    rows = np.where(np.arange(own.shape[1]) < full[:, None], own, -1).astype(">i4")
    by_blocks = np.argsort(rows.view(f"V{rows.shape[1] * 4}")[:, 0], kind="stable")
    rows, full = rows[by_blocks], full[by_blocks]
    differ = np.ones((len(rows) - 1, rows.shape[1] + 1), bool)  # the last column stops argmax for equal rows
    np.not_equal(rows[1:], rows[:-1], out=differ[:, :-1])
    same = differ.argmax(1)
    shared = units(np.minimum(same, np.minimum(full[1:], full[:-1])))
    return list(_nested(few[by_blocks], shared, minimum))


def _columns(tables: StepTables, few: Ints, full: Ints) -> int:
    # Comparing fewer blocks is faster. Prefixes are compared by a hash: equal prefixes have equal sums of products
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
    # np.unique takes several times as long
    ordered = np.sort(values)
    return not (ordered[1:] == ordered[:-1]).any()


def _nested(order: Ints, shared: Ints, minimum: GroupMinimum) -> Iterator[PrefixGroup]:
    # `order` are the sequences sorted by their blocks; shared[i] is the number of units that sequences i and i + 1
    # share
    # [start, end) of sequences, the units that enclosing groups cover, and the level
    ranges = [(0, len(order), 0, 0)]
    while ranges:
        start, end, taken, level = ranges.pop()
        if end - start < minimum.sequences:
            continue
        inside = shared[start : end - 1]
        common = int(inside.min())
        if common >= taken + minimum.units:
            yield PrefixGroup(order[start:end], taken, common, level)
            taken, level = common, level + 1
        else:
            common = taken + minimum.units - 1
        borders = (np.flatnonzero(inside <= common) + start + 1).tolist()
        parts = list(zip((start, *borders), (*borders, end), strict=True))
        ranges += [(left, right, taken, level) for left, right in reversed(parts)]
