"""Advances the inputs of a decode step by one token, so the next step can launch before the host reads the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepRows(NamedTuple):
    """The tensors that a decode step of one cache group reads; `advance_rows` overwrites all except `tables`.

    Each tensor has at least as many rows as the step has sequences. Further rows are not changed.

    Attributes:
        tables: (rows, blocks) int32, the block table of each sequence.
        block_size: number of tokens of a block.
        slots: (rows,) int64, the slot of each sequence's newest token: block * block_size + offset.
        contexts: (rows,) int32, the number of tokens of each sequence, the newest one included; None if the step does
            not read them.
        token_ids: (rows,) int64, the newest token. None if `advance_rows` changes this tensor for another cache group.
        positions: (rows,) int64, the position of the newest token; None as for `token_ids`.
    """

    tables: Tensor
    block_size: int
    slots: Tensor
    contexts: Tensor | None = None
    token_ids: Tensor | None = None
    positions: Tensor | None = None


def check_advance_rows(tokens: Tensor, firsts: Tensor, repeats: Tensor, kept: StepRows) -> None:
    """Raise ValueError unless the tensors have the shapes and dtypes that `advance_rows_reference` accepts."""
    rows, tables = len(tokens), kept.tables
    wanted = {"tokens": torch.int64, "firsts": torch.int32, "repeats": torch.int32}
    for (name, dtype), one in zip(wanted.items(), (tokens, firsts, repeats), strict=True):
        if one.shape != (rows,) or one.dtype != dtype:
            raise ValueError(f"{name} are {tuple(one.shape)} {one.dtype}, expected ({rows},) {dtype}")
    if tables.dim() != 2 or len(tables) < rows or tables.dtype != torch.int32:
        raise ValueError(f"tables are {tuple(tables.shape)} {tables.dtype}, expected ({rows}, blocks) int32")
    for name in ("slots", "contexts", "token_ids", "positions"):
        dtype, own = torch.int32 if name == "contexts" else torch.int64, getattr(kept, name)
        if own is not None and (own.dim() != 1 or len(own) < rows or own.dtype != dtype):
            raise ValueError(f"{name} are {tuple(own.shape)} {own.dtype}, expected ({rows},) {dtype}")


def advance_rows_reference(
    tokens: Tensor, step: int, firsts: Tensor, repeats: Tensor, kept: StepRows
) -> None:
    """Write the inputs of one decode step for n sequences into `kept`.

    The host launches several such steps at once, before it reads their tokens.

    `kept.positions` must hold the positions of the previous step; they are incremented.

    Args:
        tokens: (n,) int64, the tokens that the previous step sampled. A negative value means no token and becomes 0.
        step: index of the step in the launch, from 0. All earlier steps have run.
        firsts: (n,) int32, the number of tokens of each sequence in step 0, the newest one included.
        repeats: (n,) int32, the number of steps that each sequence needs. In further steps the sequence is computed at
            its last position again; the caller must ignore that output.
        kept: the tensors that the step reads; changed in place.

    Raises:
        ValueError: If shapes or dtypes do not match.
    """
    check_advance_rows(tokens, firsts, repeats, kept)
    rows, size = len(tokens), kept.block_size
    seen = firsts + torch.clamp(repeats - 1, max=step)
    last = (seen - 1).long()
    blocks = kept.tables[:rows].gather(1, (last // size)[:, None])[:, 0].long()
    kept.slots[:rows] = blocks * size + last % size
    if kept.contexts is not None:
        kept.contexts[:rows] = seen
    if kept.token_ids is not None:
        kept.token_ids[:rows] = tokens.clamp_min(0)
    if kept.positions is not None:
        kept.positions[:rows] += repeats > step
