"""Implements `doctor --measure`: measures and records the peaks and step times of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from batchinfer.core.errors import Busy, Unavailable
from batchinfer.machine.core_load import CoreLoad
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.hardware import (
    Gpu,
    Hardware,
    arithmetic_name,
    detect,
    has_fast_bf16,
    nvidia_gpus,
    remember,
)
from batchinfer.pipeline.operators_build import build_operators
from batchinfer.plan.simulation.step_parts import TimedStep, fit_step_parts
from batchinfer.plan.simulation.step_time import FIRST_USE, HOST_ROW, HOST_STEP, host_line
from batchinfer_kernels.arithmetic import Dtype, Quantization
from batchinfer_kernels.cost import Peaks

LOOK_S = 1.0  # seconds for which the load of other processes is measured
MOST_BUSY = 0.2  # cores that other processes may use


def measure_hardware(although_busy: bool = False, notice: Callable[[str], None] = lambda _: None) -> Path:
    """Measure the peaks and step times of this machine, record them in a file, and return its path.

    The CPU is measured, and the GPU if torch can use one. Forecasts and reports use the file.

    Args:
        although_busy: True to measure even if other processes use the cores.
        notice: Called with a message if CPU operators must be compiled first.

    Raises:
        Busy: Other processes use the cores before or during the measurement. Nothing is recorded.
    """
    import torch  # slow to import, and only needed here

    from batchinfer.models.ops.peaks import measure_layers, measure_peaks

    build_operators("cpu", notice)
    load = CoreLoad()
    time.sleep(LOOK_S)
    if not although_busy:
        refuse_busy(load)  # also before the measurement, which takes some seconds
    torch.set_num_threads(usable_cpus())
    found = measure_peaks("cpu")
    layers = measure_layers(tuple(found.rates))
    here = detect("cpu").measured(found.peak_flops, found.bandwidth)
    times = dict(measure_step_times(here))
    if not although_busy:
        refuse_busy(load)
    products = {dtype: {"large": found.rates[dtype], "layers": layers[dtype]} for dtype in found.rates}
    path = remember(here.measured(found.peak_flops, found.bandwidth, times, found.peak_by, products))
    if nvidia_gpus() and torch.cuda.is_available():
        found = measure_peaks("cuda")
        gpu = Gpu(found.name or "unknown GPU", None)
        path = remember(
            detect("cuda", gpu=gpu).measured(found.peak_flops, found.bandwidth, peak_by=found.peak_by)
        )
    return path


def measure_step_times(here: Hardware) -> Iterator[tuple[str, dict[str, float]]]:
    """Measure an engine step on this CPU for each dtype that `dtype: auto` can choose, with and without int8 weights.

    Args:
        here: This machine, with its measured peaks.

    Yields:
        (name of the dtype and the weights' quantisation, seconds by name of the part of the step).
    """
    for dtype, quantization in _arithmetics():
        peaks = here.peaks(dtype, quantization)
        if peaks is not None:
            yield from _step_times(dtype, quantization, peaks)


def _arithmetics() -> Iterator[tuple[Dtype, Quantization]]:
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32") if has_fast_bf16() else ("float32",)
    quantizations: tuple[Quantization, ...] = ("none", "int8")
    yield from ((dtype, quantization) for dtype in dtypes for quantization in quantizations)


def _step_times(
    dtype: Dtype, quantization: Quantization, peaks: Peaks
) -> Iterator[tuple[str, dict[str, float]]]:
    from batchinfer.engine.load.calibration import calibrate

    try:
        found = calibrate(dtype, quantization)
    except Unavailable:
        return  # int8 needs a C compiler, also in jobs
    parts = fit_step_parts([TimedStep(*step) for step in found.steps], peaks)
    rows, host_s = np.array([one[0] for one in found.host], float), np.array([one[1] for one in found.host])
    step_s, row_s = host_line(rows, host_s)
    yield (
        arithmetic_name(dtype, quantization),
        {**parts, HOST_STEP: step_s, HOST_ROW: row_s, FIRST_USE: found.first_use_s},
    )


def refuse_busy(load: CoreLoad) -> None:
    """Raise Busy if other processes have used more than 0.2 cores since the last call of `load.measure()`.

    Args:
        load: Measures the CPU time of other processes.
    """
    others = load.measure()
    if others is not None and others > MOST_BUSY:
        raise Busy(
            f"other processes use {others:.1f} of {load.cores} cores: peaks measured now would be too low, and every "
            "report and forecast would use them. Measure when the machine is quiet, or add --although-busy"
        )
