"""The tensors that a decode graph reads, apart from block tables."""

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
    """A step of `rows` rows, padding rows included, with contexts of up to `longest` tokens.

    A row is a token, of a sequence of its own unless sequences have up to `queries`. There are as many block tables as
    rows in any case: each token of padding is a sequence without a context.
    """

    rows: int
    longest: int
    block_size: int
    padding_slot: int  # where padding rows write their keys to
    adapted: bool = False  # whether rows may have adapters
    queries: int = 1  # the most tokens of a sequence

    def blocks(self, tokens: int) -> int:
        """Count the blocks of a sequence of this many tokens."""
        return -(-tokens // self.block_size)

    @property
    def table_entries(self) -> int:
        """Count the blocks of all rows, padding rows included."""
        return self.rows * self.blocks(self.longest)


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """A decode step's inputs on the device, padded to a graph's size. Padding rows have no context. Drafts are tokens
    of a decode step, too."""

    size: GraphSize
    # Token ids, positions, the slots of each cache group, and where rows may have them their adapters: (rows,)
    lines: Upload

    @classmethod
    def of(cls, batch: HostBatch, size: GraphSize, device: torch.device) -> GraphInputs:
        """Allocate tensors and copy this step into them."""
        return cls(size, Upload(_lines(batch, size), device))

    @property
    def token_ids(self) -> Tensor:
        return self.lines.tensors[0]

    def refill(self, batch: HostBatch) -> None:
        """Overwrite the tensors with another step."""
        self.lines.refill(_lines(batch, self.size))

    def inputs(self, batch: HostBatch, tables: Seq[Tensor]) -> list[AttentionInputs]:
        """Return the attention inputs of each cache group, for the step that the tensors hold.

        `tables`: (rows, blocks) each.
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
    """Return a larger array that begins with these values, or they themselves. np.pad takes ten times as long."""
    if values.shape == shape:
        return values
    grown = np.full(shape, filling, values.dtype)
    grown[tuple(slice(n) for n in values.shape)] = values
    return grown
