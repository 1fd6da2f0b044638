"""Computes the log-probabilities of given tokens, such as the tokens of a prompt or of continuations."""

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
    """The log-probabilities of n given tokens, on the device.

    Attributes:
        logprobs: float32 [n], the log-probability of each given token; NaN if logits are not finite.
        greedy: bool [n], True if the given token has the highest logit.
        top: float32 [n, likeliest], the log-probabilities of the most likely tokens at the same position, descending.
        top_ids: int64 [n, likeliest], the ids of the most likely tokens.
    """

    logprobs: Tensor
    greedy: Tensor
    top: Tensor
    top_ids: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of the fields, for the copy to the host."""
        return [self.logprobs, self.greedy, self.top, self.top_ids]


def row_scores(logits: Callable[[Tensor], Tensor], hidden: Tensor, scored: ScoredTokens) -> RowScores:
    """Compute the log-probabilities of given tokens, such as the tokens of prompts or continuations.

    Rows are processed in batches, because logits of all rows would take much memory.

    Args:
        logits: Returns the logits, float32 [n, vocab], from hidden states, [n, hidden].
        hidden: [rows, hidden], the hidden states of the tokens of a step that have an output.
        scored: The given tokens. Each has the index of the row in `hidden` whose logits give its log-probability.
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
