"""Changes to the logits of single tokens, on any device."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from batchinfer.engine.schedule.step_plan import SamplingPlan
from batchinfer.engine.tensors.staging import upload


def edit(logits: Tensor, plan: SamplingPlan) -> None:
    """Add the biases of a plan to logits (n, vocab), in place. Each is added once, so that sums have no order."""
    if plan.biased is not None:
        rows, tokens, biases = plan.biased
        arrays = rows.astype(np.int64), tokens.astype(np.int64), biases
        row, token, bias = upload(arrays, logits.device)
        logits.index_put_((row, token), logits[row, token] + bias)
