"""`doctor --measure`: the peaks of this machine, measured while it is quiet, and remembered."""

from __future__ import annotations

import time
from pathlib import Path

from batchinfer.core_load import CoreLoad
from batchinfer.cpus import usable_cpus
from batchinfer.errors import Busy
from batchinfer.report.hardware import Gpu, detect, nvidia_gpus, remember

LOOK_S = 1.0  # for how long to look whether the machine is quiet
MOST_BUSY = 0.2  # cores that other processes may use meanwhile


def measure_hardware(although_busy: bool = False) -> Path:
    """Measure the peaks of the CPU, and of the GPU where torch sees one, and remember them; the file written.

    Raises Busy, and remembers nothing, when other processes use the cores before or meanwhile, but for `although_busy`.
    """
    import torch  # slow to import, and only this verb's business

    from batchinfer.ops.peaks import measure_peaks

    load = CoreLoad()
    time.sleep(LOOK_S)
    if not although_busy:
        refuse_busy(load)  # before the measurement, too: it takes some seconds
    torch.set_num_threads(usable_cpus())
    found = measure_peaks("cpu")
    if not although_busy:
        refuse_busy(load)
    path = remember(detect("cpu").measured(found.peak_flops, found.bandwidth))
    if nvidia_gpus() and torch.cuda.is_available():
        found = measure_peaks("cuda")
        gpu = Gpu(found.name or "unknown GPU", None)
        path = remember(detect("cuda", gpu=gpu).measured(found.peak_flops, found.bandwidth))
    return path


def refuse_busy(load: CoreLoad) -> None:
    """Raises Busy when other processes used more than MOST_BUSY cores since the last look."""
    others = load.look()
    if others is not None and others > MOST_BUSY:
        raise Busy(
            f"other processes use {others:.1f} of {load.cores} cores: peaks measured now would be too low, and every "
            "report would be compared with them. Measure when the machine is quiet, or add --although-busy"
        )
