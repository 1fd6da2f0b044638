"""Prints how many decode steps a GPU's host is expected to launch at once, and the estimated gain.

python -m tests.batchinfer.engine.steps_at_once [GPU [LENGTH]]
"""

from __future__ import annotations

import sys
from dataclasses import replace

from batchinfer.engine.loop.multi_step import MultiStepDecoding
from batchinfer.engine.schedule.budget import HOST_REPEAT_ROW_S, HOST_REPEAT_S, admission_costs
from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import ModelCost, Peaks
from tests.batchinfer.engine.simulation import LLAMA_8B
from tests.batchinfer.plan.simulation.test_steady_state import H100, machine, run
from tests.model_costs import llama_cost

MODELS = {
    "0.5B": llama_cost(24, 896, 4864, 14, 2, 64, 151936, 2, 2),
    "1B": llama_cost(16, 2048, 8192, 32, 8, 64, 128256, 2, 2),
    "8B": LLAMA_8B,
}
ROWS, CONTEXT = (8, 64, 256, 1024), 512


def line(cost: ModelCost, peaks: Peaks, rows: int, length: int) -> str:
    """Return a table row of a model: the step's time on device and host, the number of steps per launch, and
    the gain."""
    chooser = MultiStepDecoding(admission_costs(cost, peaks))
    chooser.record_tokens(1000 * length, 1000)
    cached = rows * CONTEXT
    steps = chooser.choose_steps(rows, cached)
    device_ms, host_ms = 1e3 * chooser.device_s(rows, cached), 1e3 * chooser.host_s(1, rows)
    gain = chooser.tokens_per_s(steps, rows, cached) / chooser.tokens_per_s(1, rows, cached)
    return f"{device_ms:.2f}, {host_ms:.2f} | {steps} | {gain:.2f} ×"


def main(gpu: str = "NVIDIA H100 80GB HBM3", length: str = "256") -> None:
    """Print a line per number of rows.

    Args:
        length: tokens of an answer.
    """
    sheet = datasheet(gpu)
    peaks = Peaks(sheet.peak_flops["bfloat16"], sheet.bandwidth)
    print("| rows |", " | ".join(f"{name}: GPU, host, ms | steps | gain" for name in MODELS), "|")
    print("|---|" + "---|---|---|" * len(MODELS))
    for rows in ROWS:
        print(
            f"| {rows} |", " | ".join(line(cost, peaks, rows, int(length)) for cost in MODELS.values()), "|"
        )


def job_line(rows: int) -> str:
    """Return a table row: for a batch of `rows`, the seconds of a job of eight batches with single and
    multi-step decoding, for the two smaller models."""
    cells = [str(rows)]
    for cost in (MODELS["0.5B"], MODELS["1B"]):
        one = machine(cost, admission_costs(cost, H100), seqs=rows)
        time = replace(one.time, host_repeat_s=HOST_REPEAT_S, host_repeat_row_s=HOST_REPEAT_ROW_S)
        one = replace(one, time=time)
        single, several = (
            run(replace(one, repeats=repeats), CONTEXT, 256, 8 * rows).seconds for repeats in (False, True)
        )
        cells += [f"{single:.2f}, {several:.2f}", f"{single / several:.2f} ×"]
    return f"| {' | '.join(cells)} |"


def jobs() -> None:
    """Print a line of simulated jobs per number of rows."""
    print("| rows | 0.5B: single, several, s | gain | 1B: single, several, s | gain |")
    print("|---|---|---|---|---|")
    for rows in ROWS[:3]:
        print(job_line(rows))


if __name__ == "__main__":
    main(*sys.argv[1:])
    jobs()
