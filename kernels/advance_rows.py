"""Moves the rows of a decode step on by a token: the next step is launched before the host knows the tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def check_advance_rows(
    tokens: Tensor,
    firsts: Tensor,
    repeats: Tensor,
    tables: Tensor,
    slots: Tensor,
    contexts: Tensor | None,
    token_ids: Tensor | None,
    positions: Tensor | None,
) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    rows = len(tokens)
    wanted = {"tokens": torch.int64, "firsts": torch.int32, "repeats": torch.int32}
    for (name, dtype), one in zip(wanted.items(), (tokens, firsts, repeats), strict=True):
        if one.shape != (rows,) or one.dtype != dtype:
            raise ValueError(f"{name} are {tuple(one.shape)} {one.dtype}, expected ({rows},) {dtype}")
    if tables.dim() != 2 or len(tables) < rows or tables.dtype != torch.int32:
        raise ValueError(f"tables are {tuple(tables.shape)} {tables.dtype}, expected ({rows}, blocks) int32")
    written = {"slots": slots, "contexts": contexts, "token_ids": token_ids, "positions": positions}
    for name, kept in written.items():
        dtype = torch.int32 if name == "contexts" else torch.int64
        if kept is not None and (kept.dim() != 1 or len(kept) < rows or kept.dtype != dtype):
            raise ValueError(f"{name} are {tuple(kept.shape)} {kept.dtype}, expected ({rows},) {dtype}")


def advance_rows_reference(
    tokens: Tensor,
    step: int,
    firsts: Tensor,
    repeats: Tensor,
    tables: Tensor,
    block_size: int,
    slots: Tensor,
    contexts: Tensor | None = None,
    token_ids: Tensor | None = None,
    positions: Tensor | None = None,
) -> None:
    """Write what step number `step` of several reads, each of which decodes a token of n rows; the first one is number
    0, and the steps before have been run.

    tokens: (n,) int64, what the step before has sampled; a negative one stands for none, and becomes 0. firsts: (n,)
    int32, the context of each row in the first step; repeats: (n,) int32, in how many steps it has a token: in later
    ones it runs at the place of its last one again, and what it gives is of no use.

    What is written has n rows or more, of which the further ones are left alone: `slots`, int64, block * block_size +
    offset by `tables`, (n or more, blocks) int32; `contexts`, int32, if given; token_ids and positions, int64, if
    given: positions are moved on from those of the step before. Raises ValueError when shapes or dtypes do not fit.
    """
    check_advance_rows(tokens, firsts, repeats, tables, slots, contexts, token_ids, positions)
    rows = len(tokens)
    seen = firsts + torch.clamp(repeats - 1, max=step)
    last = (seen - 1).long()
    blocks = tables[:rows].gather(1, (last // block_size)[:, None])[:, 0].long()
    slots[:rows] = blocks * block_size + last % block_size
    if contexts is not None:
        contexts[:rows] = seen
    if token_ids is not None:
        token_ids[:rows] = tokens.clamp_min(0)
    if positions is not None:
        positions[:rows] += repeats > step
