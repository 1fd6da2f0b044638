"""Log-probabilities of the chosen tokens and of the most likely tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from batchinfer_kernels.sample import NO_TOKEN, ROWS_AT_ONCE

# Extra candidates, to detect ties. A row whose last candidate ties with the last requested token is sorted completely,
# which takes 20 times as long
_SPARE = 4


def check_log_probabilities(logits: Tensor, chosen: Tensor, most: int) -> None:
    """Raise ValueError unless the arguments have the shapes and dtypes that `log_probabilities_reference` accepts."""
    if logits.dim() != 2 or chosen.shape != logits.shape[:1] or chosen.dtype != torch.int64:
        raise ValueError(f"logits are {tuple(logits.shape)}, chosen {tuple(chosen.shape)} {chosen.dtype}")
    if not 0 <= most <= logits.shape[1]:
        raise ValueError(f"the top {most} tokens were requested of {logits.shape[1]}")


def log_probabilities_reference(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of the chosen and the most likely tokens, computed in float32 at temperature 1.

    If a row's greatest logit is not finite, its log-probabilities are NaN and its top ids NO_TOKEN. If the chosen token
    is NO_TOKEN, only its log-probability is NaN.

    Args:
        logits: (rows, vocab).
        chosen: (rows,) int64, the id of the token whose log-probability is wanted; NO_TOKEN: none.
        most: number of most likely tokens to return per row.

    Returns:
        Three tensors: the log-probability of each chosen token, (rows,) float32; the log-probabilities of the top
        tokens, (rows, most) float32 in descending order; and their ids, (rows, most) int64. Of equally likely tokens
        the lower id comes first.
    """
    check_log_probabilities(logits, chosen, most)
    pieces = zip(torch.split(logits, ROWS_AT_ONCE), torch.split(chosen, ROWS_AT_ONCE), strict=True)
    found = [_of_rows(rows.float(), ids, most) for rows, ids in pieces]
    of_chosen, top, top_ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    return of_chosen, top, top_ids


def _of_rows(logits: Tensor, chosen: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    broken = ~logits.amax(-1, keepdim=True).isfinite()
    # log_softmax reduces each row separately. logsumexp may split a long row, which would change bits with the batch
    found = logits.log_softmax(-1).masked_fill_(broken, float("nan"))
    ids = _most_likely(logits, most)
    of_chosen = found.gather(-1, chosen.clamp(min=0)[:, None])[:, 0]
    return (
        of_chosen.masked_fill(chosen < 0, float("nan")),
        found.gather(-1, ids),
        ids.masked_fill(broken, NO_TOKEN),
    )


def _most_likely(logits: Tensor, most: int) -> Tensor:
    vocab = logits.shape[1]
    some = min(vocab, most + _SPARE)
    values, ids = logits.topk(some, sorted=False)
    ids, order = ids.sort(-1)
    values, order = values.gather(-1, order).sort(stable=True, dim=-1, descending=True)
    ids = ids.gather(-1, order)[:, :most]
    if 0 < most < some < vocab:
        # topk may have dropped a tied token with a lower id
        unsure = (values[:, most - 1] <= values[:, -1]).nonzero()[:, 0]
        ids[unsure] = logits[unsure].sort(stable=True, dim=-1, descending=True).indices[:, :most]
    return ids
