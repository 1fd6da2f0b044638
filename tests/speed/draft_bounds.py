"""Upper bounds on the gain of drafts by the roofline, for rows whose drafts are accepted with a probability."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from batchinfer.engine.drafts.draft_value import choose_draft_counts
from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds
from tests.model_costs import llama_cost

LLAMA_135M = llama_cost(30, 576, 1536, 9, 3, 64, 49152, 2, 2)


def step_seconds(cost: ModelCost, peaks: Peaks, context: int, rows: int, drafts: int) -> float:
    """Return the roofline in seconds of a decode step of rows with equal contexts, and `drafts` drafts in total."""
    tokens, kv_tokens = rows + drafts, rows * context * cost.layers
    shape = StepShape(tokens, tokens, tokens * context * cost.layers, kv_tokens)
    return roofline_seconds(cost.step(shape), peaks)


def best_gain(seconds: Callable[[int, int], float], rows: int, rate: float) -> float:
    """Return the speedup in tokens per second by the best number of drafts."""
    rates, lengths = np.full(rows, rate), np.full(rows, MOST_DRAFTS, np.int64)
    counts = choose_draft_counts(
        rates, lengths, lambda drafts: seconds(rows, drafts), rows, rows * MOST_DRAFTS
    )
    right = sum(rate**place for count in counts.tolist() for place in range(1, count + 1))
    return (rows + right) / rows * seconds(rows, 0) / seconds(rows, int(counts.sum()))
