"""The input tensors of decode graphs, except block tables."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.staging import Upload
from batchinfer.models.ops.attention import AttentionInputs


@dataclass(frozen=True, slots=True)
class GraphSize:
    """The size of a decode graph. A row is one token.

    There is a block table for each row: each padding row is a sequence without a context.
    """

    rows: int  # tokens, including padding rows
    longest: int  # tokens of the longest context
    block_size: int
    padding_slot: int  # the slot that padding rows write K and V to
    adapted: bool = False  # True if rows may have adapters
    queries: int = 1  # maximum tokens per sequence; more than 1 to verify drafts

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks of a sequence of `tokens` tokens."""
        return -(-tokens // self.block_size)

    @property
    def table_entries(self) -> int:
        """Return the number of block table entries of all rows, including padding rows."""
        return self.rows * self.blocks(self.longest)


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """A decode step's inputs on the device, padded to a graph's size. The step may contain drafts."""

    size: GraphSize
    lines: Upload  # (rows,) each: token ids, positions, slots per cache group, and adapters if size.adapted

    @classmethod
    def of(cls, batch: HostBatch, size: GraphSize, device: torch.device) -> GraphInputs:
        """Allocate the tensors and copy a step into them."""
        return cls(size, Upload(_lines(batch, size), device))

    @property
    def token_ids(self) -> Tensor:
        """Return the token ids, (rows,)."""
        return self.lines.tensors[0]

    def refill(self, batch: HostBatch) -> None:
        """Overwrite the tensors with another step."""
        self.lines.refill(_lines(batch, self.size))

    def inputs(self, batch: HostBatch, tables: Seq[Tensor]) -> list[AttentionInputs]:
        """Return the attention inputs of each cache group.

        Args:
            batch: The step that the tensors contain.
            tables: (rows, blocks) per cache group.
        """
        _, positions, *slots = self.lines.tensors
        adapters = slots.pop() if self.size.adapted else None
        rows, sequences, tokens = self.size.rows, len(batch.context_lens), len(batch.token_ids)
        padding = [1] * (rows - tokens) + [0] * (tokens - sequences)
        query_lens, context_lens = [*batch.query_lens, *padding], [*batch.context_lens, *[0] * len(padding)]
        each = zip(slots, tables, batch.tables, batch.whole, strict=True)
        return [
            AttentionInputs(
                positions,
                own,
                table,
                query_lens,
                context_lens,
                host,
                self.size.padding_slot,
                whole,
                adapters=adapters,
                tree=batch.tree,
            )
            for own, table, host, whole in each
        ]


def _lines(batch: HostBatch, size: GraphSize) -> list[NDArray[Any]]:
    shape = (size.rows,)
    slots = (grown(own, shape, size.padding_slot) for own in batch.slots)
    adapters = [] if batch.adapters is None else [grown(batch.adapters, shape)]
    return [grown(batch.token_ids, shape), grown(batch.positions, shape), *slots, *adapters]


def grown(values: NDArray[Any], shape: tuple[int, ...], filling: int = 0) -> NDArray[Any]:
    """Pad an array at the end of each axis; return it unchanged if it has the shape. np.pad takes ten times as long."""
    if values.shape == shape:
        return values
    grown = np.full(shape, filling, values.dtype)
    grown[tuple(slice(n) for n in values.shape)] = values
    return grown
