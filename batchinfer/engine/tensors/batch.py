"""The tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchinfer.engine.kv.cache_layout import CacheLayout
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.scheduler import Chunk, sampling_chunks
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.table_rows import TableRows
from batchinfer.models.ops.interface import AttentionInputs
from batchinfer_kernels.step_tables import StepTables


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T tokens of S chunks, one chunk after the other, as the host has them."""

    token_ids: NDArray[np.int64]  # (T,)
    positions: NDArray[np.int64]  # (T,): rows of the rotary tables
    slots: list[NDArray[np.int64]]  # of each cache group: (T,)
    tables: list[StepTables]  # of each cache group
    whole: list[bool]  # of each cache group, whether it keeps all tokens
    sampled_rows: NDArray[np.int64]  # (n,): which of the T tokens are followed by a sampled one
    sampling: list[Sequence]  # (n,): whose they are
    query_lens: list[int]  # (S,)
    context_lens: list[int]  # (S,)
    parts: list[NDArray[np.int64]] = field(default_factory=list)  # of each cache group: (n, 4), or no arrays;
    # see batchinfer_kernels.copy_parts

    @property
    def is_decode(self) -> bool:
        """Whether every sequence runs exactly one token and samples the next, and nothing else is done."""
        tokens = len(self.token_ids)
        return len(self.sampled_rows) == tokens == len(self.query_lens) and not self.parts

    @property
    def table_rows(self) -> NDArray[np.int64]:
        """The rows where its sequences' tables are kept, (S,); the same array while the same sequences run in the same
        order."""
        return self.tables[0].rows

    def inputs(
        self, tables: Seq[Tensor], positions: Tensor, slots: Seq[Tensor], parts: Seq[Tensor]
    ) -> list[AttentionInputs]:
        """The attention inputs of each cache group, of the same arrays on the device, and `tables`, (S, most blocks)
        each."""
        copied_parts: Seq[Tensor | None] = parts or [None] * len(slots)
        each = zip(slots, tables, self.tables, self.whole, copied_parts, strict=True)
        return [
            AttentionInputs(
                positions, own, table, self.query_lens, self.context_lens, host, whole=whole, parts=copied
            )
            for own, table, host, whole, copied in each
        ]


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors that the model reads in one step. Built from the scheduler's chunks, and dropped after the step."""

    token_ids: Tensor  # (T,) int64
    inputs: list[AttentionInputs]  # of each cache group
    sampled_rows: Tensor  # (n,) int64
    sampling: list[Sequence]  # (n,)


def host_batch(
    chunks: list[Chunk], layout: CacheLayout, rows: TableRows, copies: Seq[Copy] = ()
) -> HostBatch:
    """Lays the scheduler's chunks out as arrays. `rows` keeps their block tables from step to step."""
    chunk_sequences, chunk_starts, chunk_lens = zip(*chunks, strict=True)
    sequences = list(chunk_sequences)
    starts, lens = np.array(chunk_starts, np.int64), np.array(chunk_lens, np.int64)
    ends, tables = np.cumsum(lens), rows.of(sequences)
    row_of = np.repeat(np.arange(len(chunks)), lens)
    positions = np.arange(len(row_of)) + (starts - ends + lens)[row_of]
    at, inside = np.divmod(positions, layout.block_size)
    contexts = (starts + lens).tolist()
    samples = sampling_chunks(chunks)
    all_sample = False not in samples  # nearly always: a list of bools takes long as an index
    return HostBatch(
        token_ids=_tokens(chunks, len(row_of)),
        positions=positions + rows.rotations(sequences)[row_of],
        slots=[
            own.kept[own.rows[row_of], at].astype(np.int64) * layout.block_size + inside for own in tables
        ],
        tables=tables,
        whole=[group.keeps is None for group in layout.groups],
        sampled_rows=(ends if all_sample else ends[samples]) - 1,
        sampling=sequences if all_sample else list(compress(sequences, samples)),
        query_lens=list(chunk_lens),
        context_lens=contexts,
        parts=_parts(copies, len(layout.groups)) if copies else [],
    )


def _parts(copies: Seq[Copy], groups: int) -> list[NDArray[np.int64]]:
    """Sort the copies by cache group: (n, 4) each."""
    fields = np.array([copy[1:] for copy in copies], np.int64)
    return [fields[fields[:, 0] == group, 1:] for group in range(groups)]


def _tokens(chunks: list[Chunk], total: int) -> NDArray[np.int64]:
    """Gather the token ids, (total,). Decode steps, of one token a chunk, take a faster way."""
    if total == len(chunks):
        return np.array([sequence.tokens[start] for sequence, start, _ in chunks], np.int64)
    return np.concatenate(
        [np.frombuffer(c.sequence.tokens, np.int32)[c.start : c.end] for c in chunks], dtype=np.int64
    )


def build_batch(
    chunks: list[Chunk],
    layout: CacheLayout,
    rows: TableRows,
    device: torch.device,
    copies: Seq[Copy] = (),
) -> Batch:
    """Lays the chunks out as tensors on the device."""
    host = host_batch(chunks, layout, rows, copies)
    tables = [torch.from_numpy(own.array()).to(device) for own in host.tables]

    def moved(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device)

    slots, parts = list(map(moved, host.slots)), list(map(moved, host.parts))
    inputs = host.inputs(tables, moved(host.positions), slots, parts)
    return Batch(moved(host.token_ids), inputs, moved(host.sampled_rows), host.sampling)
