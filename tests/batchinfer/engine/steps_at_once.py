"""Prints how many decode steps a GPU's host is expected to launch at once, and what that gives, by estimates alone.

python -m tests.batchinfer.engine.steps_at_once [GPU [LENGTH]]
"""

from __future__ import annotations

import sys

from batchinfer.engine.loop.repeated_steps import RepeatedSteps
from batchinfer.engine.schedule.budget import admission_costs
from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import ModelCost, Peaks
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.model_costs import llama_cost

MODELS = {
    "0.5B": llama_cost(24, 896, 4864, 14, 2, 64, 151936, 2, 2),
    "1B": llama_cost(16, 2048, 8192, 32, 8, 64, 128256, 2, 2),
    "8B": LLAMA_8B,
}
ROWS, CONTEXT = (8, 64, 256, 1024), 512


def line(cost: ModelCost, peaks: Peaks, rows: int, length: int) -> str:
    """Return the cells of a model: times of the device and the host for a step, how many are launched at once, and how
    many times as many tokens a second that gives."""
    chooser = RepeatedSteps(admission_costs(cost, peaks))
    chooser.note(1000 * length, 1000)
    cached = rows * CONTEXT
    steps = chooser.most(rows, cached)
    device_ms, host_ms = 1e3 * chooser.device_s(rows, cached), 1e3 * chooser.host_s(1, rows)
    gain = chooser.tokens_per_s(steps, rows, cached) / chooser.tokens_per_s(1, rows, cached)
    return f"{device_ms:.2f}, {host_ms:.2f} | {steps} | {gain:.2f} ×"


def main(gpu: str = "NVIDIA H100 80GB HBM3", length: str = "256") -> None:
    """Print a line for each number of rows. LENGTH: tokens of an answer."""
    sheet = datasheet(gpu)
    peaks = Peaks(sheet.peak_flops["bfloat16"], sheet.bandwidth)
    print("| rows |", " | ".join(f"{name}: GPU, host, ms | steps | gain" for name in MODELS), "|")
    print("|---|" + "---|---|---|" * len(MODELS))
    for rows in ROWS:
        print(
            f"| {rows} |", " | ".join(line(cost, peaks, rows, int(length)) for cost in MODELS.values()), "|"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
