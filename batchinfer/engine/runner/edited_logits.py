"""Changes to the logits of single tokens, on any device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from batchinfer.engine.schedule.step_plan import SamplingPlan
from batchinfer.engine.schedule.token_edits import AllowedTokens, BiasedTokens
from batchinfer.engine.tensors.staging import upload


def edit(logits: Tensor, plan: SamplingPlan) -> None:
    """Add the biases of a plan to logits (n, vocab), and bar the tokens that it does not allow, in place."""
    if plan.biased is not None:
        _add(logits, plan.biased)
    if plan.allowed is not None:
        _keep(logits, plan.allowed)


def _add(logits: Tensor, biased: BiasedTokens) -> None:
    """Each is added once, so that sums have no order."""
    rows, tokens, biases = biased
    row, token, bias = upload((rows.astype(np.int64), tokens.astype(np.int64), biases), logits.device)
    logits.index_put_((row, token), logits[row, token] + bias)


def _keep(logits: Tensor, allowed: AllowedTokens) -> None:
    rows, tokens = (array.astype(np.int64) for array in allowed)
    row, token, narrowed = upload((rows, tokens, np.unique(rows)), logits.device)
    kept = logits[row, token]
    logits.index_fill_(0, narrowed, float("-inf"))
    logits.index_put_((row, token), kept)
