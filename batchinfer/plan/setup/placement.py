"""The placement of a job's engines: their number, machine and GPUs, and the sharding of each model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.engine.ranks.division import UNDIVIDED, Division
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer_kernels.cost import Peaks

_MUCH_MEMORY = 1 << 62  # assumed if unknown


@dataclass(frozen=True, slots=True)
class Placement:
    """The engines of a job, and the machine and GPUs on which they run.

    Attributes:
        machine: The machine of the engines. On a cluster: the part of a node that one engine gets.
        replicas: Number of engines.
        division: How each engine shards its model among ranks.
        dedicated: True if no two engines share `machine`, as on a cluster. False: all engines run on `machine`.
        gpus: Names of GPUs for CUDA_VISIBLE_DEVICES, one per rank of all engines on this machine. Empty for a single
            rank.
    """

    machine: MachineFacts
    replicas: int = 1
    division: Division = UNDIVIDED
    dedicated: bool = False
    gpus: tuple[str, ...] = ()

    def for_rows(self, rows: int) -> Placement:
        """Return a copy with at most one engine per row to run, and at least one engine.

        Args:
            rows: Number of rows to run.
        """
        fewer = replace(self, replicas=max(1, min(self.replicas, rows)))
        ranks = fewer.processes_here
        return replace(fewer, gpus=self.gpus[:ranks] if ranks > 1 else ())

    @property
    def hardware(self) -> Hardware:
        """Return the device of the engines: a GPU or the CPU."""
        return self.machine.hardware

    @property
    def engines_here(self) -> int:
        """Return the number of engines that share one machine."""
        return 1 if self.dedicated else self.replicas

    @property
    def processes_here(self) -> int:
        """Return the number of processes (ranks of all engines) that share one machine."""
        return self.engines_here * self.division.ranks

    @property
    def free_memory(self) -> int:
        """Return the bytes of CPU memory that the engines of a machine may use, weights included."""
        known = self.machine.free_memory, self.hardware.memory_bytes
        return next((found for found in known if found is not None), _MUCH_MEMORY)

    def thread_shares(self, threads: int | None) -> list[int]:
        """Divide CPU threads among the ranks on this machine. Returns the number of threads of each rank, at least 1.

        Args:
            threads: Total number of threads. None: one per core.
        """
        cores = self.machine.cores or self.hardware.cores or threads or 1
        return thread_shares(threads, self.processes_here, cores)

    def peaks(self, dtype: str, quantization: str) -> Peaks | None:
        """Return the peak FLOP/s and bandwidth of one engine, or None if unknown.

        On GPUs they are the sum over the engine's ranks. On a CPU they are the CPU's peaks divided by the number of
        engines.

        Args:
            dtype: The data type of the products.
            quantization: The quantisation of the weights.
        """
        whole = self.hardware.peaks(dtype, quantization)
        if whole is None or (self.machine.device == "cuda" and self.division.ranks == 1):
            return whole
        if self.machine.device == "cuda":
            return whole.times(self.division.ranks)
        return whole.part(self.engines_here)


def thread_shares(threads: int | None, engines: int, cores: int) -> list[int]:
    """Divide the CPU threads of a machine among engines. Returns the number of threads of each engine, at least 1.

    Args:
        threads: Total number of threads. None: one per core. More threads than cores are not used.
        engines: Number of engines.
        cores: Number of cores.
    """
    most = min(threads or cores, cores)
    return [max(1, most * (engine + 1) // engines - most * engine // engines) for engine in range(engines)]


def placement_of(job: Job, machine: MachineFacts) -> Placement:
    """Choose the number of engines of a job and their GPUs.

    `Placement.gpus` stays empty for a single rank, or if the machine's GPUs are unknown.

    Args:
        job: The job.
        machine: The machine of the engines. On a cluster: the part of a node for one engine.

    Raises:
        JobFileError: The machine has too few cores or GPUs for the job's engines.
    """
    division = division_of(job)
    if job.ray is not None:
        _engines_here(job, machine, 1)  # raises if there is no room for the ranks
        return Placement(machine, job.ray.engine_count(machine.engines), division, dedicated=True)
    replicas, gpus = _engines_here(job, machine, job.engine.data_parallel)
    return Placement(machine, replicas, division, gpus=gpus)


def _engines_here(
    job: Job, machine: MachineFacts, asked: int | Literal["auto"]
) -> tuple[int, tuple[str, ...]]:
    ranks, room = division_of(job).ranks, _room(job, machine)
    on_gpu = machine.device == "cuda"
    if room is None or (not on_gpu and asked == "auto" and ranks == 1):
        return 1 if asked == "auto" else asked, ()
    fitting = room // ranks if on_gpu else 1
    wanted = max(1, fitting) if asked == "auto" else asked
    if wanted * ranks > max(1, room):
        what, each = "GPUs" if on_gpu else "cores", f" of {ranks} ranks each" if ranks > 1 else ""
        key = "data_parallel" if wanted > 1 or ranks == 1 else _first_parallel(job)
        who = f"{wanted} engines{each} need" if wanted > 1 or ranks == 1 else f"{ranks} ranks need"
        text = (
            f"{who} {wanted * ranks} {what}, but this process may use only {room}; lower it, or leave it out"
        )
        raise JobFileError(str(job.source), [Mistake(f"engine.{key}", text)])
    if wanted > 1 and on_gpu and job.engine.deterministic and machine.several_kinds:
        text = (
            "with engine.deterministic all engines need GPUs of the same model, but this process may use several; "
            "unset CUDA_VISIBLE_DEVICES (then all GPUs like the first one are used), or set engine.data_parallel: 1"
        )
        raise JobFileError(str(job.source), [Mistake("engine.data_parallel", text)])
    gpus = machine.gpus or ()
    return wanted, gpus[: wanted * ranks] if wanted * ranks > 1 else ()


def _room(job: Job, machine: MachineFacts) -> int | None:
    if machine.device == "cuda":
        return None if machine.gpus is None else len(machine.gpus)
    threads = job.engine.threads
    return machine.cores if threads == "auto" or machine.cores is None else min(threads, machine.cores)


def division_of(job: Job) -> Division:
    """Return the numbers of tensor-parallel, pipeline-parallel and expert-parallel ranks in the job file."""
    engine = job.engine
    return Division(engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size)


def _first_parallel(job: Job) -> str:
    kinds = ("tensor_parallel_size", "expert_parallel_size")
    return next((kind for kind in kinds if getattr(job.engine, kind) > 1), "pipeline_parallel_size")
