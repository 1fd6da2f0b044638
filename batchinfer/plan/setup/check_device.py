"""The device that a job names, which may not be there."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from batchinfer.core.errors import Unavailable
from batchinfer.job import Job
from batchinfer.machine.hardware import nvidia_gpus


def check_device(job: Job) -> None:
    """Raises Unavailable for a GPU that the job names and that is not there. In a container nvidia-smi may be
    missing."""
    if job.engine.device != "cuda":
        return
    if version("torch").endswith("+cpu"):
        raise Unavailable(
            "engine.device is cuda, and the torch that is installed computes on CPUs only; "
            "use device: cpu, or install torch with CUDA"
        )
    if not nvidia_gpus() and not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        raise Unavailable(
            "engine.device is cuda, and this machine has no NVIDIA GPU; use device: cpu, or auto"
        )
