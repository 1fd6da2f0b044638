"""The specifications of a run's workers, each with its part of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.job import Job
from batchinfer.machine.cpus import split_cores
from batchinfer.pipeline.workers.messages import EngineResources, WorkerSpec
from batchinfer.plan.setup.placement import Placement
from batchinfer.plan.setup.setting import Setting


def worker_specs(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return the specification of each engine's worker: the model to load, and the worker's share of the machine.

    Args:
        job: The job.
        setting: The job's device, arithmetic, memory and parallelism.
        factory: "module:function" of the function that loads the weights.
    """
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
    load, placement = setting.load_config(job), setting.placement
    if placement.processes_here == 1:
        return [WorkerSpec(load, job.model.path, factory)]
    threads_set = None if job.engine.threads == "auto" else job.engine.threads
    return [
        WorkerSpec(replace(load, threads=threads), job.model.path, factory, resources)
        for threads, resources in zip(
            placement.thread_shares(threads_set), _resources(placement), strict=True
        )
    ]


def _resources(placement: Placement) -> Sequence[EngineResources]:
    if placement.dedicated:
        return [EngineResources()] * placement.processes_here  # the cluster assigns cores and GPUs
    if placement.machine.device == "cuda":
        return [EngineResources(gpu=gpu) for gpu in placement.gpus]
    return [EngineResources(cores) for cores in split_cores(placement.processes_here)]
