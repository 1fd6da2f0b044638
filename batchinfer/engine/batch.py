"""The tensors of one step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.scheduler import Chunk
from batchinfer.ops.interface import AttentionInputs


@dataclass(frozen=True, slots=True)
class Batch:
    """Built from the scheduler's chunks, read by the model; passed on, never kept."""

    token_ids: Tensor  # (T,) int64
    inputs: AttentionInputs
    sampled_rows: Tensor  # (n,) int64: which of the T tokens are followed by a sampled one


def build_batch(chunks: list[Chunk], block_size: int, device: torch.device) -> Batch:
    """T tokens of the chunks, one chunk after the other."""
    lens = np.array([c.length for c in chunks])
    ends = np.cumsum(lens)
    tokens = np.concatenate([np.frombuffer(c.sequence.tokens, np.int32)[c.start : c.end] for c in chunks])
    row_of = np.repeat(np.arange(len(chunks)), lens)
    starts = np.array([c.start for c in chunks])
    positions = np.arange(len(tokens)) - (ends - lens)[row_of] + starts[row_of]
    tables = _block_tables(chunks)
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    sampled = ends[[i for i, c in enumerate(chunks) if c.samples]] - 1
    inputs = AttentionInputs(
        positions=torch.from_numpy(positions).to(device),
        slots=torch.from_numpy(slots).to(device),
        block_tables=torch.from_numpy(tables).to(device),
        query_lens=lens.tolist(),
        context_lens=[c.end for c in chunks],
    )
    token_ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    return Batch(token_ids, inputs, torch.from_numpy(sampled.astype(np.int64)).to(device))


def _block_tables(chunks: list[Chunk]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """(S, most blocks) int32, padded with 0."""
    tables = np.zeros((len(chunks), max(len(c.sequence.blocks) for c in chunks)), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
    return tables
