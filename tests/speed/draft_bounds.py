"""What drafts can gain at best, by the roofline of steps, for rows whose drafts are right with a probability."""

from __future__ import annotations

from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.engine.drafts.medusa import RANKS, best_shape
from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer.engine.drafts.worth import drafts_worth
from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.model_costs import llama_cost
from tests.speed.harness import option, section, show

LLAMA_135M = llama_cost(30, 576, 1536, 9, 3, 64, 49152, 2, 2)
RATES = (0.95, 0.8, 0.6)
HEADS = 4
# How often the first candidate of each head is right, and the next ones: about as Cai et al., 2024, figure 2 has them
RIGHT = [[first, 0.13, 0.06, 0.03, 0.02] for first in (0.6, 0.5, 0.42, 0.36)]
Rows = list[dict[str, Any]]


def step_seconds(cost: ModelCost, peaks: Peaks, context: int, rows: int, drafts: int) -> float:
    """Return the bound of a decode step of rows with a context each and `drafts` drafts in all."""
    tokens, kv_tokens = rows + drafts, rows * context * cost.layers
    shape = StepShape(tokens, tokens, tokens * context * cost.layers, kv_tokens)
    return roofline_seconds(cost.step(shape), peaks)


def best(seconds: partial[float], rows: int, rate: float) -> tuple[float, float]:
    """Return the best number of drafts for each row, and its gain in tokens a second."""
    rates, lengths = np.full(rows, rate), np.full(rows, MOST_DRAFTS, np.int64)
    counts = drafts_worth(rates, lengths, lambda drafts: seconds(rows, drafts), rows, rows * MOST_DRAFTS)
    drafts = int(counts.sum())
    right = sum(rate**place for count in counts.tolist() for place in range(1, count + 1))
    return drafts / rows, (rows + right) / rows * seconds(rows, 0) / seconds(rows, drafts)


def _rows_each(cost: ModelCost, peaks: Peaks, counts: tuple[int, ...], contexts: tuple[int, ...]) -> Rows:
    found = Rows()
    for rows in counts:
        for context in contexts:
            gains = [best(partial(step_seconds, cost, peaks, context), rows, rate) for rate in RATES]
            texts = [f"{gain:.2f} × ({drafts:.1f})" for drafts, gain in gains]
            named = {f"{rate:.0%} right": text for rate, text in zip(RATES, texts, strict=True)}
            found.append({"rows": rows, "context": context, **named})
    return found


def _trees(peaks: Peaks) -> Rows:
    found = Rows()
    for rows in (1, 2, 4, 8, 16, 64):
        seconds = [step_seconds(LLAMA_135M, peaks, 512, rows, rows * n) for n in range(25)]
        line = {}
        for name, ranks, most in (
            ("chain", 1, HEADS),
            ("tree of as many", RANKS, HEADS),
            ("of up to 24", RANKS, 24),
        ):
            chances = best_shape([own[:ranks] for own in RIGHT], most).chances
            gains = [(1 + sum(chances[:n])) * seconds[0] / seconds[n] for n in range(len(chances) + 1)]
            at = max(range(len(gains)), key=gains.__getitem__)
            line[name] = f"{gains[at]:.2f} × ({at}, {1 + sum(chances[:at]):.2f} tokens a step)"
        found.append({"rows": rows, **line})
    return found


@section(
    "draft-bounds",
    option("kind", choices=("h100", "cpu", "trees"), help="the table"),
    option("--peaks", type=float, nargs=2, metavar=("FLOPS", "BYTES"), help="of a CPU; otherwise an H100's"),
)
def bounds(given: Namespace, _: Path) -> Rows:
    """Print how many times as many tokens a second drafts can give by the roofline of steps.

    `h100`: 8B parameters. `cpu`: 135M. `trees`: 135M, the best tree and the best chain of the drafts of heads.
    """
    sheet = datasheet("NVIDIA H100 80GB HBM3")
    assert sheet is not None
    peaks = Peaks(*(given.peaks or (sheet.peak_flops["bfloat16"], sheet.bandwidth)))
    if given.kind == "h100":
        found = _rows_each(LLAMA_8B, peaks, (1, 8, 64, 256), (512, 8192))
    elif given.kind == "cpu":
        found = _rows_each(LLAMA_135M, peaks, (1, 2, 4, 8, 64, 256), (512,))
    else:
        found = _trees(peaks)
    show(found)
    return found
