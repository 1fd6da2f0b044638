"""The facts about a machine that are needed to set up a job."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.hardware import (
    FIRST_WITH_FP8,
    Hardware,
    detect,
    has_fast_bf16,
    min_capability,
    nvidia_gpus,
    several_kinds,
    usable_gpus,
)
from batchinfer.machine.memory import available_memory
from batchinfer_kernels.arithmetic import Device
from batchinfer_kernels.tiles import tile_grant


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The machine on which a job's engines run.

    All fields are plain values: one machine can send its description to another. None means unknown, and an unknown
    fact limits nothing: a job gets all the cores and GPUs that it needs.
    """

    hardware: Hardware  # the device that engines use: the CPU, or each GPU
    cores: int | None = None  # CPU cores that this process may use
    free_memory: int | None = None  # bytes that were free before the first engine started
    torch_has_cuda: bool | None = None
    has_gpu: bool | None = None  # in a container, nvidia-smi may list none
    gpus: tuple[str, ...] | None = None  # that CUDA may use, as CUDA_VISIBLE_DEVICES names them
    several_kinds: bool = False  # True if `gpus` may be different models
    capability: tuple[int, ...] | None = None  # the lowest compute capability of `gpus`
    fast_bf16: bool = False  # True if the CPU multiplies bfloat16 in hardware
    tiles: bool = False  # True if the CPU's matrix tiles (AMX) may be used
    arm: bool = False
    engines: int = 1  # for which a cluster has room; each gets what the other fields describe

    @property
    def device(self) -> Device:
        """Return the device that engines use."""
        return self.hardware.device

    @property
    def multiplies_fp8(self) -> bool:
        """Return True if all GPUs multiply float8. Their peaks decide if the driver reports no capability."""
        if self.device != "cuda":
            return False
        if self.capability is not None:
            return self.capability >= FIRST_WITH_FP8
        return "fp8" in self.hardware.peak_flops

    @property
    def devices(self) -> int:
        """Return the number of devices. A CPU counts as one, even if several processes share it."""
        return max(1, len(self.gpus or ())) if self.device == "cuda" else 1

    def arm_sums(self, dtype: str) -> str:
        """Return the name of the order in which the compiled operators of an Arm CPU add, or "" on other devices.

        Arm vectors are shorter than x86-64 vectors, so sums have another order. BFDOT (and BFMMLA, which the same CPUs
        have) also rounds bfloat16 sums differently.
        """
        if self.device != "cpu" or not self.arm:
            return ""
        return "bfdot" if dtype == "bfloat16" and self.fast_bf16 else "neon"


def this_machine(asked: Device | Literal["auto"]) -> MachineFacts:
    """Describe this machine for a job.

    Args:
        asked: The job's `engine.device`. With `cpu`, GPUs are not detected. With `auto`, a GPU is used only if the
            installed torch supports it.
    """
    # The version of torch's CPU build ends with +cpu
    torch_has_cuda = None if asked == "cpu" else not version("torch").endswith("+cpu")
    found = nvidia_gpus() if asked == "cuda" or torch_has_cuda else []
    on_gpu = asked == "cuda" or bool(found)
    names = usable_gpus(found) if on_gpu else ()
    return MachineFacts(
        detect("cuda", gpu=found[0] if found else None) if on_gpu else detect("cpu"),
        cores=usable_cpus(),
        free_memory=available_memory(),
        torch_has_cuda=torch_has_cuda,
        has_gpu=None if asked == "cpu" else bool(found) or _has_gpu_files(),
        gpus=names if on_gpu else None,
        several_kinds=on_gpu and several_kinds(found),
        capability=min_capability(names) if found else None,
        fast_bf16=has_fast_bf16(),
        tiles=not on_gpu and tile_grant().given,
        arm=platform.machine() in ("aarch64", "arm64"),
    )


def _has_gpu_files() -> bool:
    """Return True if the system has a device file of a GPU. In a container, nvidia-smi may be missing."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
