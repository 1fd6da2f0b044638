"""Checks the device that a job names, and whether its memory holds the KV cache of `engine.kv_memory`."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

from batchinfer.core.errors import Unavailable
from batchinfer.core.wording import size
from batchinfer.job import Job
from batchinfer.machine.hardware import nvidia_gpus
from batchinfer.plan.setup.draft_place import PlacedModel
from batchinfer.plan.setup.resolve import Setting


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


def check_kv_memory(job: Job, models: list[PlacedModel]) -> None:
    """Check that the KV cache can fit into memory at all.

    Args:
        job: The job.
        models: The job's model, and a draft model that runs in the same engines.

    Raises:
        JobFileError: The device, the machine or its control group has less memory after the weights are loaded.
    """
    asked, setting = job.engine.kv_memory, models[0].setting
    total = setting.hardware.memory_bytes
    if not isinstance(asked, int) or total is None:
        return
    weights = _weights(models)
    room = max(0, total - weights)
    if asked > room:
        raise job.mistake(
            "engine.kv_memory",
            f"{size(asked)} is more than {_place(setting)} has: {size(total)} of memory, and the weights take "
            f"{size(weights)} of it; use at most {room >> 20}MiB, or auto",
        )


def kv_memory_warnings(job: Job, models: list[PlacedModel]) -> list[str]:
    """Return a line if less memory is free now than the KV cache may take. What GPUs have free is not known here."""
    asked, setting = job.engine.kv_memory, models[0].setting
    if not isinstance(asked, int) or setting.device == "cuda" or setting.free_memory is None:
        return []
    weights = _weights(models)
    if asked <= setting.free_memory - weights:
        return []
    return [
        f"engine.kv_memory: {size(asked)} and {size(weights)} of weights are more than the {size(setting.free_memory)} "
        "of memory that are free now; end other programs, or lower it"
    ]


def _weights(models: list[PlacedModel]) -> int:
    """Return the bytes of weights on a GPU, or of all engines that share this machine's CPU."""
    setting = models[0].setting
    whole = sum(model.weight_bytes for model in models)
    whole += 0 if setting.heads is None else setting.heads.weight_bytes(setting.itemsize)
    if setting.device == "cuda":
        return whole // setting.division.ranks
    return whole * setting.processes_here // setting.division.ranks


def _place(setting: Setting) -> str:
    return f"a {setting.hardware.name}" if setting.device == "cuda" else "this machine"
