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

    All fields are plain values, so that a machine can send its description to another. None means unknown. An unknown
    number of cores or GPUs does not limit a job.

    Args:
        hardware: The device that engines use: the CPU, or each GPU.
        cores: The number of CPU cores that this process may use.
        free_memory: The bytes of memory that were free before the first engine started.
        torch_has_cuda: True if the installed torch supports CUDA.
        has_gpu: True if the machine has a GPU, even if nvidia-smi in a container lists none.
        gpus: The GPUs that CUDA may use, by their names for CUDA_VISIBLE_DEVICES.
        several_kinds: True if `gpus` may be different models.
        capability: The lowest compute capability of `gpus`, such as (9, 0).
        fast_bf16: True if the CPU multiplies bfloat16 in hardware.
        tiles: True if the CPU's matrix tiles (AMX) may be used.
        arm: True if the CPU is an Arm CPU.
        engines: The number of engines for which a cluster has room. The other fields describe what each engine gets.
    """

    hardware: Hardware
    cores: int | None = None
    free_memory: int | None = None
    torch_has_cuda: bool | None = None
    has_gpu: bool | None = None
    gpus: tuple[str, ...] | None = None
    several_kinds: bool = False
    capability: tuple[int, ...] | None = None
    fast_bf16: bool = False
    tiles: bool = False
    arm: bool = False
    engines: int = 1

    @property
    def device(self) -> Device:
        """Return the kind of device that engines use: "cpu" or "cuda"."""
        return self.hardware.device

    @property
    def multiplies_fp8(self) -> bool:
        """Return True if engines use GPUs, and all of them multiply float8 in hardware."""
        if self.device != "cuda":
            return False
        if self.capability is not None:
            return self.capability >= FIRST_WITH_FP8
        return "fp8" in self.hardware.peak_flops

    @property
    def devices(self) -> int:
        """Return the number of GPUs that engines may use; 1 if they use the CPU."""
        return max(1, len(self.gpus or ())) if self.device == "cuda" else 1

    def arm_sums(self, dtype: str) -> str:
        """Return the instructions with which compiled operators add numbers on an Arm CPU; "" on other devices.

        The result is "bfdot" or "neon". Answers may differ between them.

        Args:
            dtype: The dtype of activations.
        """
        # BFDOT (and BFMMLA, which the same CPUs have) rounds bfloat16 sums differently
        if self.device != "cpu" or not self.arm:
            return ""
        return "bfdot" if dtype == "bfloat16" and self.fast_bf16 else "neon"


def this_machine(asked: Device | Literal["auto"]) -> MachineFacts:
    """Describe this machine for a job.

    Args:
        asked: The job's `engine.device`. With "cpu", GPUs are not detected. With "auto", a GPU is used only if the
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
    # In a container, nvidia-smi may be missing
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
