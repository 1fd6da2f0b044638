"""Computes log-probabilities of given tokens, as the next token of rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.schedule.step_plan import ScoredTokens
from batchinfer.engine.tensors.staging import upload

_ROWS_AT_ONCE = 128  # with a vocabulary of 150,000, logits and log-softmax take 77 MB each in float32


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """Log-probabilities of the tokens in a plan's `scored`, in the same order."""

    logprobs: Tensor  # (n,) float32; NaN where logits are not finite
    greedy: Tensor  # (n,) bool: True if the token is the argmax
    top: Tensor  # (n, likeliest) float32: log-probabilities of the likeliest tokens at that position, descending
    top_ids: Tensor  # (n, likeliest) int64

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors, for the copy to the host."""
        return [self.logprobs, self.greedy, self.top, self.top_ids]


def row_scores(logits: Callable[[Tensor], Tensor], hidden: Tensor, scored: ScoredTokens) -> RowScores:
    """Compute the log-probabilities of `scored`, in batches of rows to limit the memory of logits.

    Args:
        logits: Computes logits, (n, hidden) → (n, vocab) float32.
        hidden: (rows, hidden).
        scored: Rows of `hidden`, and the tokens to score as their next token.
    """
    asked, places = np.unique(scored.rows, return_inverse=True)  # rows without a scored token are skipped
    index, rows, tokens = upload(
        [asked.astype(np.int64), places.astype(np.int64), scored.tokens.astype(np.int64)], hidden.device
    )
    count, most = len(tokens), scored.likeliest
    found = RowScores(
        hidden.new_empty(count, dtype=torch.float32),
        torch.empty(count, dtype=torch.bool, device=hidden.device),
        hidden.new_empty((count, most), dtype=torch.float32),
        torch.zeros((count, most), dtype=torch.int64, device=hidden.device),
    )
    hidden = hidden if len(asked) == len(hidden) else hidden.index_select(0, index)
    for first in range(0, len(hidden), _ROWS_AT_ONCE):
        piece = logits(hidden[first : first + _ROWS_AT_ONCE])
        low, high = np.searchsorted(places, (first, first + len(piece))).tolist()
        own, given = rows[low:high] - first, tokens[low:high]
        logprobs = piece.log_softmax(-1)
        found.logprobs[low:high] = logprobs[own, given]
        found.greedy[low:high] = piece.argmax(-1)[own] == given
        if most:
            top, ids = logprobs.topk(min(most, piece.shape[1]), -1)
            found.top[low:high, : top.shape[1]] = top[own]
            found.top_ids[low:high, : top.shape[1]] = ids[own]
    return found
