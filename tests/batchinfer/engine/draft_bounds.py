"""Prints what drafts can gain at best: by the roofline of steps, for rows whose drafts are right with a probability.

python -m tests.batchinfer.engine.draft_bounds h100 | waiting | cpu FLOPS BYTES
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np

from batchinfer.engine.drafts.source import MOST_DRAFTS
from batchinfer.engine.drafts.worth import Decoding, drafts_worth, waiting_gain
from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.model_costs import llama_cost

QWEN_HALF_B = llama_cost(24, 896, 4864, 14, 2, 64, 151936, 2, 2)
LLAMA_135M = llama_cost(30, 576, 1536, 9, 3, 64, 49152, 2, 2)
RATES = (0.95, 0.8, 0.6)


def step_seconds(cost: ModelCost, peaks: Peaks, rows: int, context: int, layers: int, drafts: int) -> float:
    """Return the bound of a decode step of rows with a context each and so many drafts in all."""
    tokens, kv_tokens = rows + drafts, rows * context * layers
    shape = StepShape(tokens, tokens, tokens * context * layers, kv_tokens)
    return roofline_seconds(cost.step(shape), peaks)


def best(seconds: partial[float], rows: int, rate: float) -> tuple[float, float]:
    """Return the drafts a row that give the most tokens a second, and how many times as many that are."""
    rates, lengths = np.full(rows, rate), np.full(rows, MOST_DRAFTS, np.int64)
    counts = drafts_worth(rates, lengths, lambda drafts: seconds(drafts=drafts), rows, rows * MOST_DRAFTS)
    drafts = int(counts.sum())
    right = sum(rate**place for count in counts.tolist() for place in range(1, count + 1))
    return drafts / rows, (rows + right) / rows * seconds(drafts=0) / seconds(drafts=drafts)


def table(
    cost: ModelCost, peaks: Peaks, layers: int, rows: tuple[int, ...], contexts: tuple[int, ...]
) -> None:
    """Print a line for each number of rows and context."""
    print("| rows | context |", " | ".join(f"{rate:.0%} right" for rate in RATES), "|")
    print("|---|---|" + "---|" * len(RATES))
    for count in rows:
        for context in contexts:
            seconds = partial(step_seconds, cost, peaks, count, context, layers)
            found = [best(seconds, count, rate) for rate in RATES]
            print(f"| {count} | {context} |", " | ".join(f"{gain:.2f} × ({n:.1f})" for n, gain in found), "|")


def _seconds(cost: ModelCost, peaks: Peaks, context: int, rows: int, drafts: int) -> float:
    return step_seconds(cost, peaks, rows, context, cost.layers, drafts)


def waiting(peaks: Peaks) -> None:
    """Print how many times as many tokens a second there are where a GPU's step waits for all rows with drafts, of
    which half are in flight; a part of the rows has none. Four drafts a row, each right with a probability of 80 %."""
    right = sum(0.8**place for place in range(1, 5))
    print("| rows | context | with drafts | 8B | 0.5B |\n|---|---|---|---|---|")
    for rows in (2, 8, 64, 256):
        for context in (512, 8192):
            for drafted in (rows, rows // 2):
                half = drafted // 2 or 1
                parts = [Decoding(n, 4 * n, n * (1 + right)) for n in (half, drafted - half)]
                gains = [
                    waiting_gain(partial(_seconds, cost, peaks, context), *parts, rows - drafted)
                    for cost in (LLAMA_8B, QWEN_HALF_B)
                ]
                print(
                    f"| {rows} | {context} | {drafted} |", " | ".join(f"{gain:.2f} ×" for gain in gains), "|"
                )


def main(machine: str, *peaks: str) -> None:
    """Print the tables of a machine."""
    if machine == "h100":
        sheet = datasheet("NVIDIA H100 80GB HBM3")
        whole = Peaks(sheet.peak_flops["bfloat16"], sheet.bandwidth)
        table(LLAMA_8B, whole, LLAMA_8B.layers, (1, 8, 64, 256), (512, 8192))
    elif machine == "waiting":
        sheet = datasheet("NVIDIA H100 80GB HBM3")
        waiting(Peaks(sheet.peak_flops["bfloat16"], sheet.bandwidth))
    else:
        flops, moved = map(float, peaks)
        table(LLAMA_135M, Peaks(flops, moved), 30, (1, 2, 4, 8, 64, 256), (512,))


if __name__ == "__main__":
    main(*sys.argv[1:])
