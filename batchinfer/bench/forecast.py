"""Forecasts a workload's time like `batchinfer plan` before the first run of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from batchinfer.bench.planning import plan_rows
from batchinfer.bench.workloads import Row
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.machine.hardware import detect
from batchinfer.plan.order.requests import read_requests
from batchinfer.plan.simulation.simulator import SimulatedEngine, simulate
from batchinfer.plan.simulation.step_time import StepTime


def calibrated_time(device: str, dtype: str, quantization: str) -> StepTime | None:
    """Return this machine's step times, as `batchinfer doctor --measure` measured them; None if it has not.

    Args:
        device: "cpu" or "cuda".
        dtype: Dtype of the run.
        quantization: Quantisation of the linear layers as loaded.
    """
    here = detect(device)
    peaks, times = here.peaks(dtype, quantization), here.step_time(dtype, quantization)
    found = None if peaks is None or times is None else StepTime.calibrated(peaks, times)
    # The warm-up run has used the cache memory
    return None if found is None else replace(found, first_use_s=0.0)


def forecast_seconds(loaded: LoadedModel, rows: Sequence[Row], time: StepTime) -> float:
    """Return the time that a simulation forecasts for the rows in the engine, in seconds.

    It assumes that every answer has its maximum length.

    Args:
        loaded: The model, with its limits and memory.
        rows: The rows of a workload.
        time: The durations of steps.
    """
    runner, limits = loaded.runner, loaded.limits
    machine = SimulatedEngine(
        runner.cost,
        runner.layout,
        loaded.info.blocks,
        limits,
        loaded.engine_limits.roots,
        time,
        runner.looks_ahead,
    )
    with temporary_folder("bench") as folder:
        planned = plan_rows(rows, Path(folder), loaded.info.threads, machine.roots)
        requests = [
            request
            for _, batch in read_requests(planned.plan, planned.tokens, REQUEST_BATCH, machine.roots)
            for request in batch
        ]
    return simulate(machine, requests, {r.key: r.params.max_tokens for r in requests}).seconds
