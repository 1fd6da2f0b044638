"""Block tables on the device. The host sends only new entries."""

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
    """A device copy of the arrays of TableRows, updated before each step.

    A step's tables are gathered from the copy on the device, so the work of the host does not grow with the lengths of
    contexts.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # per cache group
        self.changes = 0  # incremented by each update

    def refresh(self, rows: TableRows, device: torch.device) -> None:
        """Send entries that were written since the last call. Raises torch.OutOfMemoryError."""
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
        """Return a step's tables per cache group, (n, max blocks) int32.

        Args:
            tables: The tables of the step's sequences per cache group.
            rows: (n,) int64 on the device: rows of the sequences, then of padding.
        """
        each = zip(self._kept, tables, strict=True)
        return [kept[:, : own.width].index_select(0, rows) for kept, own in each]

    def write(self, views: Seq[Tensor], tables: Seq[StepTables], rows: Tensor) -> None:
        """Copy the block tables of the rows into the first columns of `views`.

        Args:
            views: One tensor (rows, at least the blocks of the longest row) per cache group.
            tables: The block tables of the step, one per cache group.
            rows: The table row of each row of the views.
        """
        for view, own in zip(views, self.of(tables, rows), strict=True):
            view[:, : own.shape[1]].copy_(own)


@dataclass(slots=True, eq=False)
class _Laid:
    """The tables that the graphs' tensors currently contain."""

    size: GraphSize
    rows: NDArray[np.int64]
    on_device: Tensor  # (size.rows,): `rows`, then row 0 for padding
    changes: int  # `DeviceTables.changes` when they were written


class GraphTables:
    """The tensors from which CUDA graphs read block tables. Filled before each replay, shared by all graph sizes."""

    def __init__(self, groups: int, entries: int, device: torch.device) -> None:
        """Allocate the tensors.

        Args:
            groups: Number of cache groups.
            entries: Rows × blocks of the largest graph size.
            device: The device.
        """
        self._flat = [torch.zeros(entries, dtype=torch.int32, device=device) for _ in range(groups)]
        self._laid: _Laid | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self._flat[0].device

    def views(self, size: GraphSize) -> list[Tensor]:
        """Return the tables that graphs of this size read: (rows, blocks) per cache group."""
        rows, blocks = size.rows, size.blocks(size.longest)
        return [flat[: rows * blocks].view(rows, blocks) for flat in self._flat]

    def fill(self, size: GraphSize, tables: Seq[StepTables], kept: DeviceTables) -> list[Tensor]:
        """Write the tables of a step for a graph of the given size, and return `views(size)`.

        Padding rows get the table of row 0. Nothing is written if the tables have not changed since the last call.
        """
        views, last, rows = self.views(size), self._laid, tables[0].rows
        is_same = last is not None and last.size == size and last.rows is rows
        if last is not None and is_same:
            if last.changes == kept.changes:
                return views
            on_device = last.on_device
        else:
            padded = np.zeros(size.rows, np.int64)
            padded[: len(rows)] = rows
            (on_device,) = upload([padded], views[0].device)
        self._laid = None  # in case memory runs out while writing
        kept.write(views, tables, on_device)
        self._laid = _Laid(size, rows, on_device, kept.changes)
        return views
