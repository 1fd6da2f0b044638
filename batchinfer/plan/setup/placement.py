"""The placement of a job's engines: their number, their machine, and the division of the model of each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.engine.ranks.seat import UNDIVIDED, Division
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer_kernels.cost import Peaks

_MUCH_MEMORY = 1 << 62  # if unknown


@dataclass(frozen=True, slots=True)
class Placement:
    """Places the engines of a job on machines and GPUs."""

    machine: MachineFacts  # that engines run on; on a cluster, the part of a node that each engine gets
    replicas: int = 1  # engines that share the work
    division: Division = UNDIVIDED  # of the ranks of each
    apart: bool = False  # whether `machine` describes what each engine has to itself, as on a cluster
    # one for each of several ranks of all engines of this machine, as CUDA_VISIBLE_DEVICES names them
    gpus: tuple[str, ...] = ()

    def for_rows(self, rows: int) -> Placement:
        """Return the placement with at most one engine for each row."""
        fewer = replace(self, replicas=max(1, min(self.replicas, rows)))
        ranks = fewer.processes_here
        return replace(fewer, gpus=self.gpus[:ranks] if ranks > 1 else ())

    @property
    def hardware(self) -> Hardware:
        """Return the device that engines use."""
        return self.machine.hardware

    @property
    def engines_here(self) -> int:
        """Count the engines that share the machine."""
        return 1 if self.apart else self.replicas

    @property
    def processes_here(self) -> int:
        """Count the ranks of all engines that share the machine."""
        return self.engines_here * self.division.ranks

    @property
    def free_memory(self) -> int:
        """Return the bytes of memory that a CPU's engines may take, weights included."""
        known = self.machine.free_memory, self.hardware.memory_bytes
        return next((found for found in known if found is not None), _MUCH_MEMORY)

    def thread_shares(self, threads: int | None) -> list[int]:
        """Return the CPU threads of each process of this machine. `threads`: of all; None: one for each core."""
        cores = self.machine.cores or self.hardware.cores or threads or 1
        return thread_shares(threads, self.processes_here, cores)

    def peaks(self, dtype: str, quantization: str) -> Peaks | None:
        """Return the peaks of one engine's hardware in this arithmetic: of a GPU for each of its ranks, or of its part
        of a CPU; None if unknown."""
        whole = self.hardware.peaks(dtype, quantization)
        if whole is None or (self.machine.device == "cuda" and self.division.ranks == 1):
            return whole
        if self.machine.device == "cuda":
            return whole.times(self.division.ranks)
        return whole.part(self.engines_here)


def thread_shares(threads: int | None, engines: int, cores: int) -> list[int]:
    """Return the CPU threads of each engine. `threads`: of all; None: one for each core."""
    most = min(threads or cores, cores)
    return [max(1, most * (engine + 1) // engines - most * engine // engines) for engine in range(engines)]


def placement_of(job: Job, machine: MachineFacts) -> Placement:
    """Return how many engines share the work, and on which GPUs; none are named for a single rank, or for a machine
    whose GPUs are not known.

    Raises:
        JobFileError: The machine has room for fewer engines.
    """
    division = division_of(job)
    if job.ray is not None:
        _engines_here(job, machine, 1)  # raises if there is no room for the ranks
        return Placement(machine, job.ray.engine_count(machine.engines), division, apart=True)
    replicas, gpus = _engines_here(job, machine, job.engine.data_parallel)
    return Placement(machine, replicas, division, gpus=gpus)


def _engines_here(
    job: Job, machine: MachineFacts, asked: int | Literal["auto"]
) -> tuple[int, tuple[str, ...]]:
    """Return how many engines the machine has, and their GPUs."""
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
            "with engine.deterministic all engines need GPUs of one kind, but this process may use several; unset "
            "CUDA_VISIBLE_DEVICES (then all GPUs of the first one's kind are used), or set engine.data_parallel: 1"
        )
        raise JobFileError(str(job.source), [Mistake("engine.data_parallel", text)])
    gpus = machine.gpus or ()
    return wanted, gpus[: wanted * ranks] if wanted * ranks > 1 else ()


def _room(job: Job, machine: MachineFacts) -> int | None:
    """Return how many processes the GPUs or cores of the machine have room for; None: it is not known."""
    if machine.device == "cuda":
        return None if machine.gpus is None else len(machine.gpus)
    threads = job.engine.threads
    return machine.cores if threads == "auto" or machine.cores is None else min(threads, machine.cores)


def division_of(job: Job) -> Division:
    """Return how the job divides its model among ranks."""
    engine = job.engine
    return Division(engine.tensor_parallel_size, engine.pipeline_parallel_size, engine.expert_parallel_size)


def _first_parallel(job: Job) -> str:
    kinds = ("tensor_parallel_size", "expert_parallel_size")
    return next((kind for kind in kinds if getattr(job.engine, kind) > 1), "pipeline_parallel_size")
