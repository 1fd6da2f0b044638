"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.cache_layout import CacheLayout
from batchinfer.engine.scheduler import Chunk
from batchinfer.ops.interface import AttentionInputs


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T tokens of S chunks, one chunk after the other, as the host has them."""

    token_ids: NDArray[np.int64]  # (T,)
    positions: NDArray[np.int64]  # (T,): rows of the rotary tables
    slots: list[NDArray[np.int64]]  # of each cache group: (T,)
    tables: list[NDArray[np.int32]]  # of each cache group: (S, most blocks), padded with 0
    whole: list[bool]  # of each cache group, whether it keeps all tokens
    sampled_rows: NDArray[np.int64]  # (n,): which of the T tokens are followed by a sampled one
    query_lens: list[int]  # (S,)
    context_lens: list[int]  # (S,)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence runs exactly one token and samples the next."""
        return len(self.sampled_rows) == len(self.token_ids) == len(self.query_lens)

    @property
    def places(self) -> list[NDArray[Any]]:
        """The arrays that `inputs` wants on the device."""
        return [self.positions, *self.slots, *self.tables]

    def inputs(self, positions: Tensor, *places: Tensor) -> list[AttentionInputs]:
        """The attention inputs of each cache group, with `places` on the device."""
        lens, groups = (self.query_lens, self.context_lens), len(self.tables)
        each = zip(places[:groups], places[groups:], self.tables, self.whole, strict=True)
        return [
            AttentionInputs(positions, slots, tables, *lens, host, whole=whole)
            for slots, tables, host, whole in each
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors that the model reads in one step. Built from the scheduler's chunks, and dropped after the step."""

    token_ids: Tensor  # (T,) int64
    inputs: list[AttentionInputs]  # of each cache group
    sampled_rows: Tensor  # (n,) int64


def host_batch(chunks: list[Chunk], layout: CacheLayout) -> HostBatch:
    """Lays the scheduler's chunks out as arrays."""
    block_size = layout.block_size
    lens = np.array([c.length for c in chunks])
    ends = np.cumsum(lens)
    tokens = _tokens(chunks)
    row_of = np.repeat(np.arange(len(chunks)), lens)
    starts = np.array([c.start for c in chunks])
    positions = np.arange(len(tokens)) - (ends - lens)[row_of] + starts[row_of]
    tables = [_block_tables(chunks, group) for group in range(len(layout.groups))]
    at, inside = positions // block_size, positions % block_size
    slots = [table[row_of, at].astype(np.int64) * block_size + inside for table in tables]
    rotated = np.array([c.sequence.rotated_from for c in chunks])
    sampled = ends[[i for i, c in enumerate(chunks) if c.samples]] - 1
    return HostBatch(
        token_ids=tokens,
        positions=positions + rotated[row_of],
        slots=slots,
        tables=tables,
        whole=[group.keeps is None for group in layout.groups],
        sampled_rows=sampled.astype(np.int64),
        query_lens=lens.tolist(),
        context_lens=[c.end for c in chunks],
    )


def _tokens(chunks: list[Chunk]) -> NDArray[np.int64]:
    """(T,) token ids. Decode steps, of one token a chunk, take a faster way."""
    if all(c.length == 1 for c in chunks):
        return np.array([c.sequence.tokens[c.start] for c in chunks], np.int64)
    return np.concatenate(
        [np.frombuffer(c.sequence.tokens, np.int32)[c.start : c.end] for c in chunks], dtype=np.int64
    )


def build_batch(chunks: list[Chunk], layout: CacheLayout, device: torch.device) -> Batch:
    """Lays the chunks out as tensors on the device."""
    host = host_batch(chunks, layout)
    inputs = host.inputs(*(torch.from_numpy(array).to(device) for array in host.places))
    token_ids, sampled = (torch.from_numpy(a).to(device) for a in (host.token_ids, host.sampled_rows))
    return Batch(token_ids, inputs, sampled)


def _block_tables(chunks: list[Chunk], group: int) -> NDArray[np.int32]:
    """(S, most blocks) int32, padded with 0."""
    found = [chunk.sequence.tables[group] for chunk in chunks]
    tables = np.zeros((len(found), max(map(len, found))), np.int32)
    for row, table in enumerate(found):
        tables[row, : len(table)] = table
    return tables
