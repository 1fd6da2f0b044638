"""How single queries' keys are split among programs: a list of work items on the device, which a graph's launch reads.

How many programs are launched depends on the list's length alone. What each of them passes over stands in the list, so
that a graph with a fixed number of items serves any lengths: a long row among short ones gets as many items as it needs
(split-KV: Flash-Decoding, Dao et al., 2023; work items: FlashInfer, Ye et al., 2024).
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
# Splits begin at its multiples: whole cache lines, whole tiles of most kernels
UNIT = 64
ENDLESS = 1 << 30  # keys of a row's last item: to the end of its context, however far that has grown
COLUMNS = 4  # of an item: 16 bytes


@dataclass(frozen=True, eq=False)
class Splits:
    """n rows' own keys as m items; made by a `Splitter`. A row is one query of one sequence, or `queries` at most."""

    array: StepArray  # items, then places
    count: int  # m
    parts: int  # that there is room for: as many as items, where each row is one query
    whole: bool  # every row is one item, and no part is to be merged
    window: int | None
    align: int  # a window's first key is rounded down to it
    keys: Ints = field(repr=False)  # (n,): own keys of each row when the items were made
    queries: int = 1  # the most of a row

    @cached_property
    def items(self) -> Tensor:
        """(m, 4) int32 on the device: row (-1: padding), keys between the row's first and the item's, keys, place of
        the part, of the row's first query; keys count from `own_begin`."""
        return self.array.tensor[: COLUMNS * self.count].view(self.count, COLUMNS)

    @cached_property
    def places(self) -> Tensor:
        """(T + 1,) int32 on the device: query i's parts lie at places[i] to places[i + 1]; T is n where each row is one
        query."""
        return self.array.tensor[COLUMNS * self.count :]

    @property
    def sizes(self) -> tuple[object, ...]:
        """The sizes on which launches depend."""
        counts = (self.count, self.parts, len(self.keys), self.queries, len(self.array.values))
        return *counts, self.whole, self.window, self.align


@dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts rows so that all programs together fill the GPU evenly, or, where `deterministic`, at fixed positions.

    `longest`: a bound of the contexts where a graph is to run the list. Then there are few lengths of a list: with
    padding, so that a graph serves what rows have; None: it is as long as it has to be. `queries`: the most that a row
    has.
    """

    kv_heads: int
    device: torch.device
    deterministic: bool = False
    longest: int | None = None
    queries: int = 1

    @property
    def align(self) -> int:
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
        """contexts, starts: (n,): row i passes over keys [starts[i], contexts[i]). `segment`: about how many an item
        has, for the default mode; chosen from the sum if not given. `lens`: (n,): queries of each row, which see what
        comes before them; None: each has one. `arrays`: to which the list is added; `number`: of the one that is put
        there instead."""
        ends = contexts if lens is None else contexts - np.maximum(lens, 1) + 1
        keys = self._own(contexts, starts, window, ends)
        counts, lengths = self._cut(keys, segment)
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
        """The splits of the same rows, of a query each, with longer contexts: the same ones as long as they serve.
        `arrays`: made `again` of those in which the splits lie."""
        if self.serve(splits, contexts, starts):
            return replace(splits, array=splits.array.of(arrays))
        return self.split(contexts, starts, splits.window, arrays=arrays, number=splits.array.number)

    def serve(self, splits: Splits, contexts: Ints, starts: Ints) -> bool:
        """Whether the splits are those of the same rows, of a query each, with longer contexts, too.

        By default a row's last item has what came since, up to what is worth an item. Where cuts are at fixed
        positions, they serve until a row has one more.
        """
        keys = self._own(contexts, starts, splits.window, contexts)
        if self.deterministic:
            return np.array_equal(-(-keys // SEGMENT), -(-splits.keys // SEGMENT))
        begun = keys[splits.keys == 0].any()  # a row without keys has no item
        return not begun and bool((keys - splits.keys).max(initial=0) < LEAST_SEGMENT)

    def _own(self, contexts: Ints, starts: Ints, window: int | None, nearest: Ints) -> Ints:
        """Keys from `own_begin` to the end. `nearest`: (n,): those that a row's first query sees."""
        if window is None:
            return contexts - starts
        behind = np.maximum(nearest - window - starts, 0)
        return contexts - starts - behind // self.align * self.align

    def _cut(self, keys: Ints, segment: int | None) -> tuple[Ints, Ints]:
        """(items of each row, keys of each item but the last)"""
        if self.deterministic:
            return -(-keys // SEGMENT), np.full(len(keys), SEGMENT)
        segment = segment or choose_segment(int(keys.sum()), self.kv_heads, self.device)
        evenly = -(-keys // np.maximum(-(-keys // segment), 1))
        lengths = np.maximum(-(-evenly // UNIT) * UNIT, UNIT)
        return -(-keys // lengths), lengths

    def _splits_anyway(self, rows: int) -> bool:
        """Whether a graph has parts although no row needs them now: with so few rows any that is not short does, and
        one graph serves both."""
        if self.longest is None or self.deterministic:
            return False
        return rows < most_own(0, self.kv_heads, self.device)

    def _room(self, rows: int, items: int, queries: int = 1) -> int:
        """How many items a list has where rows are split, or parts of so many rows with up to `queries` each. By
        `choose_segment` they are no more than `most_own`; at fixed positions they are as many as the contexts ask for.
        """
        if self.longest is None:
            return items
        if not self.deterministic:
            return most_own(rows, self.kv_heads, self.device, queries)
        return min(1 << (items - 1).bit_length(), most_segments(rows, self.longest))
