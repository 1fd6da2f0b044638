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
    """The size of a CUDA graph of a decode step.

    Attributes:
        rows: The number of tokens of the step, padding included. Each has a block table: a padding token counts as a
            sequence without a context.
        longest: The maximum context length in tokens.
        block_size: The number of tokens per KV cache block.
        padding_slot: The KV cache slot that receives the keys and values of padding tokens.
        adapted: True if rows may have LoRA adapters.
        queries: The maximum number of tokens per sequence; more than 1 for steps that verify drafts.
    """

    rows: int
    longest: int
    block_size: int
    padding_slot: int
    adapted: bool = False
    queries: int = 1

    def blocks(self, tokens: int) -> int:
        """Return the number of KV cache blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    @property
    def table_entries(self) -> int:
        """The total number of block table entries of all rows, padding included."""
        return self.rows * self.blocks(self.longest)


@dataclass(frozen=True, slots=True, eq=False)
class GraphInputs:
    """The device inputs of a decode step, padded to the size of a CUDA graph, without block tables.

    Attributes:
        size: The size of the graph.
        lines: Tensors of [size.rows] each: token ids, positions, slots per cache group, and adapter slots if
            `size.adapted`.
    """

    size: GraphSize
    lines: Upload

    @classmethod
    def of(cls, batch: HostBatch, size: GraphSize, device: torch.device) -> GraphInputs:
        """Allocate device tensors for graphs of a size, and copy the inputs of the step `batch` into them."""
        return cls(size, Upload(_lines(batch, size), device))

    @property
    def token_ids(self) -> Tensor:
        """The token ids on the device, [rows], padding included."""
        return self.lines.tensors[0]

    def refill(self, batch: HostBatch) -> None:
        """Overwrite the device tensors with the inputs of the step `batch`, which must fit their size."""
        self.lines.refill(_lines(batch, self.size))

    def inputs(self, batch: HostBatch, tables: Seq[Tensor]) -> list[AttentionInputs]:
        """Return the attention inputs of each cache group.

        Args:
            batch: The step whose inputs were copied to the device tensors.
            tables: [rows, blocks] per cache group, the padded block tables.
        """
        _, positions, *slots = self.lines.tensors
        adapters = slots.pop() if self.size.adapted else None
        rows, sequences, tokens = self.size.rows, len(batch.context_lens), len(batch.token_ids)
        padding = [1] * (rows - tokens) + [0] * (tokens - sequences)
        query_lens, context_lens = [*batch.query_lens, *padding], [*batch.context_lens, *[0] * len(padding)]
        each = zip(slots, tables, batch.tables, batch.keeps_all, strict=True)
        return [
            AttentionInputs(
                positions,
                own,
                table,
                query_lens,
                context_lens,
                host,
                self.size.padding_slot,
                keeps_all,
                adapters=adapters,
                tree=batch.tree,
            )
            for own, table, host, keeps_all in each
        ]


def _lines(batch: HostBatch, size: GraphSize) -> list[NDArray[Any]]:
    shape = (size.rows,)
    slots = (pad_array(own, shape, size.padding_slot) for own in batch.slots)
    adapters = [] if batch.adapters is None else [pad_array(batch.adapters, shape)]
    return [pad_array(batch.token_ids, shape), pad_array(batch.positions, shape), *slots, *adapters]


def pad_array(values: NDArray[Any], shape: tuple[int, ...], filling: int = 0) -> NDArray[Any]:
    """Return an array that is padded at the end of each axis. An array that has the shape already is returned itself.

    Args:
        values: The array.
        shape: The shape of the result.
        filling: The value of the padding.
    """
    if values.shape == shape:
        return values
    padded = np.full(shape, filling, values.dtype)  # np.pad takes ten times as long
    padded[tuple(slice(n) for n in values.shape)] = values
    return padded
