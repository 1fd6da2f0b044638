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
    """The block tables of all running sequences on the device. Changed entries are sent before each step."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []  # per cache group
        self.changes = 0  # incremented by each update

    def refresh(self, rows: TableRows, device: torch.device) -> None:
        """Send the entries of block tables to the device that were written since the last call.

        Args:
            rows: The block tables on the host. Their entries are marked as sent.
            device: The device.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
        """
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
        """Return the block tables of a step's sequences, gathered on the device.

        Args:
            tables: The block tables of the step's sequences on the host, per cache group.
            rows: int64 [n] on the device, the table row of each sequence. Padding rows may have any table row.

        Returns:
            int32 [n, blocks of the longest sequence] per cache group.
        """
        each = zip(self._kept, tables, strict=True)
        return [kept[:, : own.width].index_select(0, rows) for kept, own in each]

    def write(self, views: Seq[Tensor], tables: Seq[StepTables], rows: Tensor) -> None:
        """Copy the block tables of a step's sequences into the first columns of given device tensors.

        Args:
            views: The tensors to write, [n, at least the blocks of the longest sequence] per cache group.
            tables: The block tables of the step's sequences on the host, per cache group.
            rows: int64 [n] on the device, the table row to copy to each row of `views`.
        """
        for view, own in zip(views, self.of(tables, rows), strict=True):
            view[:, : own.shape[1]].copy_(own)


@dataclass(slots=True, eq=False)
class _Laid:
    """The block tables that the tensors of the graphs contain at present.

    Attributes:
        size: The size of the graph for which they were written.
        rows: The table row of each sequence.
        on_device: `rows` on the device, [size.rows], with row 0 for padding.
        changes: The value of `DeviceTables.changes` when the tensors were written.
    """

    size: GraphSize
    rows: NDArray[np.int64]
    on_device: Tensor
    changes: int


class GraphTables:
    """The device tensors from which CUDA graphs read block tables.

    Graphs of all sizes have the same tensors, which are filled before each replay.
    """

    def __init__(self, groups: int, entries: int, device: torch.device) -> None:
        """Allocate the tensors.

        Args:
            groups: The number of cache groups.
            entries: The number of table entries of the largest graph: number of rows times blocks per row.
            device: The device of the tensors.
        """
        self._flat = [torch.zeros(entries, dtype=torch.int32, device=device) for _ in range(groups)]
        self._laid: _Laid | None = None

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self._flat[0].device

    def views(self, size: GraphSize) -> list[Tensor]:
        """Return the tensors that graphs of a size read, [rows, blocks] per cache group.

        They are views of memory that all sizes share.
        """
        rows, blocks = size.rows, size.blocks(size.longest)
        return [flat[: rows * blocks].view(rows, blocks) for flat in self._flat]

    def fill(self, size: GraphSize, tables: Seq[StepTables], kept: DeviceTables) -> list[Tensor]:
        """Write the block tables of a step into the tensors that graphs of a size read.

        Padding rows get table row 0. Nothing is written if the tensors contain these block tables already.

        Args:
            size: The size of the graph.
            tables: The block tables of the step's sequences on the host, per cache group.
            kept: The block tables on the device, with all entries that the step needs.

        Returns:
            The tensors, [rows, blocks] per cache group.
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
