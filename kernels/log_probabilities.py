"""How likely the chosen tokens were, and which tokens were the most likely ones."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.sample import NO_TOKEN, ROWS_AT_ONCE

# Candidates beyond those asked for. A row whose last one is as likely as the last one asked for is sorted as a whole,
# which takes 20 times as long.
_SPARE = 4


def check_log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> None:
    """Raises ValueError when shapes or dtypes do not fit."""
    if logits.dim() != 2 or chosen.shape != logits.shape[:1] or chosen.dtype != torch.int64:
        raise ValueError(f"logits are {tuple(logits.shape)}, chosen {tuple(chosen.shape)} {chosen.dtype}")
    if not 0 <= most <= logits.shape[1]:
        raise ValueError(f"the top {most} of {logits.shape[1]} tokens")


def log_probabilities_reference(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen, top, ids): log-softmax of logits (rows, vocab) in float32, as they are: no temperature, no filter.

    chosen: (rows,) int64 token ids → (rows,) float32; the top `most`, (rows, most) float32, with their ids (rows, most)
    int64, in descending order, the lower id of equals first. A row whose maximum is not finite, or whose chosen token
    is NO_TOKEN, has NaN there; its top ids are NO_TOKEN in the first case. ROWS_AT_ONCE rows are computed at a time,
    which bounds the memory.
    """
    check_log_probabilities(logits, chosen, most)
    pieces = zip(torch.split(logits, ROWS_AT_ONCE), torch.split(chosen, ROWS_AT_ONCE), strict=True)
    found = [_of_rows(rows.float(), ids, most) for rows, ids in pieces]
    of_chosen, top, top_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    return of_chosen, top, top_ids


def _of_rows(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    broken = ~logits.amax(-1, keepdim=True).isfinite()
    # log_softmax takes each row by itself; `sum`, and so logsumexp, may cut a long row into parts
    found = logits.log_softmax(-1).masked_fill_(broken, float("nan"))
    ids = _most_likely(logits, most)
    of_chosen = found.gather(-1, chosen.clamp(min=0)[:, None])[:, 0]
    return (
        of_chosen.masked_fill(chosen < 0, float("nan")),
        found.gather(-1, ids),
        ids.masked_fill(broken, NO_TOKEN),
    )


def _most_likely(logits: Tensor, most: int) -> Tensor:
    """(rows, most) ids in descending order of their logits, the lower id of equals first."""
    vocab = logits.shape[1]
    some = min(vocab, most + _SPARE)
    values, ids = logits.topk(some, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    ids = ids.gather(-1, order)[:, :most]
    if 0 < most < some < vocab:
        # of equals, topk may have left out one with a lower id
        unsure = (values[:, most - 1] <= values[:, -1]).nonzero()[:, 0]
        ids[unsure] = logits[unsure].sort(stable=True, dim=-1, descending=True).indices[:, :most]
    return ids
