"""Finds how likely given tokens are behind the rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchinfer.engine.schedule.step_plan import ScoredTokens
from batchinfer.engine.tensors.staging import upload

_ROWS_AT_ONCE = 128  # of 150,000 logits these are 77 MB in float32, and as much their log-softmax


@dataclass(frozen=True, slots=True, eq=False)
class RowScores:
    """The log-probabilities of the tokens that a plan's `scored` names, in its order."""

    logprobs: Tensor  # (n,) float32; NaN where logits are not finite
    greedy: Tensor  # (n,) bool: whether the token is the argmax

    @property
    def tensors(self) -> list[Tensor]:
        return [self.logprobs, self.greedy]


def row_scores(logits: Callable[[Tensor], Tensor], hidden: Tensor, scored: ScoredTokens) -> RowScores:
    """Score tokens behind the rows of `hidden`, (rows, hidden). `logits` makes the logits of rows, (n, vocab) float32:
    some rows at a time, because each token of a long prompt may be asked about."""
    rows, tokens = upload([scored.rows.astype(np.int64), scored.tokens.astype(np.int64)], hidden.device)
    logprobs = hidden.new_empty(len(tokens), dtype=torch.float32)
    greedy = torch.empty(len(tokens), dtype=torch.bool, device=hidden.device)
    for first in range(0, len(hidden), _ROWS_AT_ONCE):
        piece = logits(hidden[first : first + _ROWS_AT_ONCE])
        low, high = np.searchsorted(scored.rows, (first, first + len(piece))).tolist()
        own, asked = rows[low:high] - first, tokens[low:high]
        logprobs[low:high] = piece.log_softmax(-1)[own, asked]
        greedy[low:high] = piece.argmax(-1)[own] == asked
    return RowScores(logprobs, greedy)
