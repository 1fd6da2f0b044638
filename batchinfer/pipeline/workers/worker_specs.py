"""The specifications of a run's workers, with the share of the machine of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.job import Job
from batchinfer.machine.cpus import split_cores
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.plan.setup.placement import Placement
from batchinfer.plan.setup.setting import Setting


def worker_specs(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return a specification for each engine."""
    placement = setting.placement
    ranks, processes = placement.division.ranks, _processes(job, setting, factory)
    if placement.dedicated:
        processes *= placement.replicas
    return [
        replace(
            processes[first], division=placement.division, others=tuple(processes[first + 1 : first + ranks])
        )
        for first in range(0, len(processes), ranks)
    ]


def _processes(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return the specification of each process on one machine. A single process may use the whole machine."""
    load, placement = setting.load_config(job), setting.placement
    if placement.processes_here == 1:
        return [WorkerSpec(load, job.model.path, factory)]
    threads_set = None if job.engine.threads == "auto" else job.engine.threads
    return [
        WorkerSpec(replace(load, threads=threads), job.model.path, factory, place)
        for threads, place in zip(placement.thread_shares(threads_set), _places(placement), strict=True)
    ]


def _places(placement: Placement) -> Sequence[EnginePlace]:
    """Return the place of each rank of each engine on this machine, in the order of engines."""
    if placement.dedicated:
        return [EnginePlace()] * placement.processes_here  # the cluster assigns cores and GPUs
    if placement.machine.device == "cuda":
        return [EnginePlace(gpu=gpu) for gpu in placement.gpus]
    return [EnginePlace(cores) for cores in split_cores(placement.processes_here)]
