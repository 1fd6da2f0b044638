"""Block tables on the device: the host sends what sequences got since the step before, and the device lays it out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.engine.tensors.staging import upload
from batchinfer.engine.tensors.table_rows import TableRows
from batchinfer_kernels.step_tables import StepTables


class DeviceTables:
    """A copy of the arrays of TableRows, brought up to date before each step.

    What steps read of it is a tensor of their own, with a row for each of their sequences, in order: the work of the
    host does not grow with the contexts of those that stay.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # of each cache group
        self.changes = 0  # another number once something has changed

    def refresh(self, rows: TableRows, device: torch.device) -> None:
        """Send what was written since the last call. Raises torch.OutOfMemoryError."""
        arrays = rows.arrays()
        if [kept.shape for kept in self._kept] != [array.shape for array in arrays]:
            self._kept = upload(arrays, device)
        else:
            unsent = rows.unsent()
            if not any(len(places) for places, _ in unsent):
                return
            sent = upload([array for own in unsent for array in own], device)
            for kept, places, blocks in zip(self._kept, sent[::2], sent[1::2], strict=True):
                kept.view(-1).index_copy_(0, places, blocks)
        self.changes += 1
        rows.sent()

    def of(self, tables: Seq[StepTables], rows: Tensor) -> list[Tensor]:
        """Gather a step's tables of each cache group, (n, most blocks) int32 each. `rows`: (n,) int64, their rows on
        the device, and any others behind them."""
        each = zip(self._kept, tables, strict=True)
        return [kept[:, : own.width].index_select(0, rows) for kept, own in each]

    def write(self, views: Seq[Tensor], tables: Seq[StepTables], rows: Tensor) -> None:
        """`of`, into the first columns of `views`, (n, at least as many blocks) each."""
        for view, own in zip(views, self.of(tables, rows), strict=True):
            view[:, : own.shape[1]].copy_(own)


@dataclass(slots=True, eq=False)
class _Laid:
    """The tables that the tensors of graphs hold."""

    size: GraphSize
    rows: NDArray[np.int64]
    on_device: Tensor  # (size.rows,): the same, and row 0 for padding rows
    changes: int  # `DeviceTables.changes` when they were laid


class GraphTables:
    """The tensors from which graphs read block tables. Graphs of all sizes share their memory: it is filled before each
    replay."""

    def __init__(self, groups: int, entries: int, device: torch.device) -> None:
        """`entries`: rows × blocks of the largest size."""
        self._flat = [torch.zeros(entries, dtype=torch.int32, device=device) for _ in range(groups)]
        self._laid: _Laid | None = None

    @property
    def device(self) -> torch.device:
        """The device where they lie."""
        return self._flat[0].device

    def views(self, size: GraphSize) -> list[Tensor]:
        """Return the tables as graphs of this size read them, (rows, blocks) of each cache group."""
        rows, blocks = size.rows, size.blocks(size.longest)
        return [flat[: rows * blocks].view(rows, blocks) for flat in self._flat]

    def fill(self, size: GraphSize, tables: Seq[StepTables], kept: DeviceTables) -> list[Tensor]:
        """Write the tables of a step of at most this many rows → `views`. Padding rows hold another row's."""
        views, last, rows = self.views(size), self._laid, tables[0].rows
        known = last is not None and last.size == size and last.rows is rows
        if last is not None and known:
            if last.changes == kept.changes:
                return views
            on_device = last.on_device
        else:
            padded = np.zeros(size.rows, np.int64)
            padded[: len(rows)] = rows
            (on_device,) = upload([padded], views[0].device)
        self._laid = None  # should there be no memory in the middle of it
        kept.write(views, tables, on_device)
        self._laid = _Laid(size, rows, on_device, kept.changes)
        return views
