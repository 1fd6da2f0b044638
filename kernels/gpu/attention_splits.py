"""Splits the keys of single queries among programs, with a list of work items on the device.

The number of programs depends only on the list's length, and the list tells each program what to read. A graph with a
fixed number of items can therefore serve any lengths: a long row among short ones gets more items (split-KV:
Flash-Decoding, Dao et al., 2023; work items: FlashInfer, Ye et al., 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer_kernels.gpu.attention_launch import (
    LEAST_SEGMENT,
    SEGMENT,
    choose_segment,
)
from batchinfer_kernels.gpu.part_room import most_own, most_segments
from batchinfer_kernels.gpu.step_arrays import StepArray, StepArrays

Ints = NDArray[np.int64]
# Splits start at multiples of this many keys: whole cache lines, and whole tiles of most kernels
UNIT = 64
ENDLESS = 1 << 30  # as keys of a row's last item: up to the end of its context, even after it has grown
COLUMNS = 4  # int32 fields of an item


@dataclass(frozen=True, eq=False)
class Splits:
    """The keys that n rows of decode attention read for themselves, split into m work items by a `Splitter`.

    A row is one or, with `queries` above 1, several queries of one sequence. Each item of a row yields one partial
    attention result per query.

    Attributes:
        array: an array with the items, then the indices of partial results.
        count: m, the number of items, padding included.
        parts: number of partial results for which there is room.
        whole: True if every row is one item, so that no partial results are merged.
        window: sliding window of the layers; None: full attention.
        align: keys before the window are skipped in multiples of this number.
        keys: (n,), number of own keys of each row when the items were made.
        queries: maximum number of queries of a row.
    """

    array: StepArray
    count: int
    parts: int
    whole: bool
    window: int | None
    align: int
    keys: Ints = field(repr=False)
    queries: int = 1

    @cached_property
    def items(self) -> Tensor:
        """Return the work items (m, 4) int32 on the device.

        The columns are:

        - row of decode attention; -1 for padding
        - first key, counted from the row's first own key (`first_own_key`)
        - number of keys
        - index of the partial result of the row's first query
        """
        return self.array.tensor[: COLUMNS * self.count].view(self.count, COLUMNS)

    @cached_property
    def places(self) -> Tensor:
        """Return (T + 1,) int32 on the device: query i has the partial results [places[i], places[i + 1])."""
        return self.array.tensor[COLUMNS * self.count :]

    @property
    def sizes(self) -> tuple[object, ...]:
        """Return all sizes of the splits that a captured graph fixes. A graph can only run splits with equal sizes."""
        counts = (self.count, self.parts, len(self.keys), self.queries, len(self.array.values))
        return *counts, self.whole, self.window, self.align


@dataclass(frozen=True, slots=True)
class Splitter:
    """Splits the keys of rows into work items, so that programs fill the GPU evenly.

    In deterministic mode it splits at fixed positions instead, so that results do not depend on other rows.

    Attributes:
        kv_heads: number of programs per work item.
        device: device of the items.
        deterministic: True to split at multiples of SEGMENT keys.
        longest: maximum number of keys of a row, if a captured graph reads the items. Their number is then padded to
            one of a few sizes. None: it is not padded.
        queries: maximum number of queries of a row.
    """

    kv_heads: int
    device: torch.device
    deterministic: bool = False
    longest: int | None = None
    queries: int = 1

    @property
    def align(self) -> int:
        """Return a number of keys: keys before a sliding window are skipped in multiples of it."""
        return SEGMENT if self.deterministic else UNIT

    def split(
        self,
        contexts: Ints,
        starts: Ints,
        window: int | None = None,
        segment: int | None = None,
        lens: Ints | None = None,
        arrays: StepArrays | None = None,
        number: int | None = None,
    ) -> Splits:
        """Split the keys of n rows into work items; row i reads the keys [starts[i], contexts[i]).

        Args:
            contexts: (n,), number of keys of each row's sequence.
            starts: (n,), number of leading keys that each row does not read, because they are shared.
            window: sliding window of the layers; None: full attention.
            segment: approximate number of keys of an item. None: chosen from the total. Not used if `deterministic`.
            lens: (n,), number of queries of each row, which are the last tokens of its sequence. None: each row has
                one.
            arrays: the step's arrays, which receive the items; None: new arrays.
            number: number of the array in `arrays` to replace; None: an array is added.
        """
        ends = contexts if lens is None else contexts - np.maximum(lens, 1) + 1
        keys = self._own(contexts, starts, window, ends)
        counts, lengths = self._split_keys(keys, segment)
        whole = bool(counts.max(initial=0) <= 1) and not self._splits_anyway(len(keys))
        counts = np.ones_like(counts) if whole else counts
        row = np.repeat(np.arange(len(keys)), counts)
        firsts = np.concatenate([[0], np.cumsum(counts)])
        items = np.empty((len(row), COLUMNS), np.int64)
        items[:, 0], items[:, 3] = row, np.arange(len(row))
        items[:, 1], items[:, 2] = (items[:, 3] - firsts[row]) * lengths[row], lengths[row]
        if not self.deterministic:
            longest_first = np.argsort(items[:, 1] - np.minimum(keys[row], items[:, 1] + items[:, 2]))
            items[firsts[1:][counts > 0] - 1, 2] = ENDLESS
        places = firsts
        if lens is not None:
            places = np.concatenate([[0], np.cumsum(np.repeat(counts, lens))])
            items[:, 3] += (places[np.cumsum(lens) - lens] - firsts[:-1])[row]
        items = items if self.deterministic else items[longest_first]
        count = len(row) if whole else self._room(len(keys), len(row))
        queries, parts = len(places) - 1, int(places[-1])
        parts = queries if whole else self._room(queries, parts, self.queries)
        padding = np.tile([-1, 0, 0, 0], count - len(row))
        flat = np.concatenate([items.ravel(), padding, places])
        arrays = arrays or StepArrays(self.device)
        array = arrays.add(flat) if number is None else arrays.put(number, flat)
        return Splits(array, count, parts, whole, window, self.align, keys, self.queries)

    def grown(self, splits: Splits, contexts: Ints, starts: Ints, arrays: StepArrays) -> Splits:
        """Return the splits for the same rows with more keys. Each row must have a single query.

        The items stay the same if they cover the new keys.

        Args:
            splits: the earlier splits.
            contexts: (n,), the new number of keys of each row's sequence.
            starts: (n,), number of leading keys that each row does not read.
            arrays: the arrays of the later step, made by `again` from the arrays of `splits`.
        """
        if self.serve(splits, contexts, starts):
            return replace(splits, array=splits.array.of(arrays))
        return self.split(contexts, starts, splits.window, arrays=arrays, number=splits.array.number)

    def serve(self, splits: Splits, contexts: Ints, starts: Ints) -> bool:
        """Return True if the items of earlier splits also cover the new keys of the same rows.

        By default a row's last item also covers new keys, up to LEAST_SEGMENT of them. In deterministic mode the items
        are valid until a row needs one more segment.

        Args:
            splits: the earlier splits.
            contexts: (n,), the new number of keys of each row's sequence.
            starts: (n,), number of leading keys that each row does not read.
        """
        keys = self._own(contexts, starts, splits.window, contexts)
        if self.deterministic:
            return np.array_equal(-(-keys // SEGMENT), -(-splits.keys // SEGMENT))
        begun = keys[splits.keys == 0].any()  # a row that had no keys has no item
        return not begun and bool((keys - splits.keys).max(initial=0) < LEAST_SEGMENT)

    def _own(self, contexts: Ints, starts: Ints, window: int | None, nearest: Ints) -> Ints:
        # Own keys begin at `first_own_key`; `nearest` is the number of keys that a row's first query sees
        if window is None:
            return contexts - starts
        behind = np.maximum(nearest - window - starts, 0)
        return contexts - starts - behind // self.align * self.align

    def _split_keys(self, keys: Ints, segment: int | None) -> tuple[Ints, Ints]:
        if self.deterministic:
            return -(-keys // SEGMENT), np.full(len(keys), SEGMENT)
        segment = segment or choose_segment(int(keys.sum()), self.kv_heads, self.device)
        evenly = -(-keys // np.maximum(-(-keys // segment), 1))
        lengths = np.maximum(-(-evenly // UNIT) * UNIT, UNIT)
        return -(-keys // lengths), lengths

    def _splits_anyway(self, rows: int) -> bool:
        # With few rows any long row is split. A captured graph then reserves parts even if no row is split now, so that
        # one graph serves both cases
        if self.longest is None or self.deterministic:
            return False
        return rows < most_own(0, self.kv_heads, self.device)

    def _room(self, rows: int, items: int, queries: int = 1) -> int:
        if self.longest is None:
            return items
        if not self.deterministic:
            return most_own(rows, self.kv_heads, self.device, queries)
        return min(1 << (items - 1).bit_length(), most_segments(rows, self.longest))
