"""Moves the rows of a decode step on by a token: the next step is launched before the host knows the tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class StepRows(NamedTuple):
    """It names the tensors from which a decode step of n rows reads a cache group. They have n rows or more; the
    further ones are left alone."""

    tables: Tensor  # (rows, blocks) int32
    block_size: int
    slots: Tensor  # (rows,) int64: block * block_size + offset, where the K and V of the newest token go
    contexts: Tensor | None = None  # (rows,) int32; None: nothing reads them
    # (rows,) int64, each; None: they are those of another group, and moved on with it
    token_ids: Tensor | None = None
    positions: Tensor | None = None


def check_advance_rows(tokens: Tensor, firsts: Tensor, repeats: Tensor, kept: StepRows) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
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
    """Write what step number `step` of several reads, each of which decodes a token of n rows; the first one is number
    0, and the steps before have been run.

    tokens: (n,) int64, what the step before has sampled; a negative one stands for none, and becomes 0. firsts: (n,)
    int32, the context of each row in the first step; repeats: (n,) int32, in how many steps it has a token: in later
    ones it runs at the place of its last one again, and what it gives is of no use. Positions are moved on from those
    of the step before. Raises ValueError when shapes or dtypes do not fit.
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
