"""How likely the chosen tokens were, and which tokens were the most likely ones."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.sample import NO_TOKEN


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
    is NO_TOKEN, has NaN there; its top ids are NO_TOKEN in the first case.
    """
    check_log_probabilities(logits, chosen, most)
    wide = logits.float()
    broken = ~wide.amax(-1, keepdim=True).isfinite()
    found = wide.log_softmax(-1).masked_fill(broken, float("nan"))
    top, ids = (t[:, :most] for t in wide.sort(stable=True, dim=-1, descending=True))
    top = found.gather(-1, ids)
    of_chosen = found.gather(-1, chosen.clamp(min=0)[:, None])[:, 0]
    return of_chosen.masked_fill(chosen < 0, float("nan")), top, ids.masked_fill(broken, NO_TOKEN)
