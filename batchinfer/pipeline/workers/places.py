"""The engines of a run, and what each of them gets of which machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from batchinfer.job import Job
from batchinfer.machine.cpus import divided_cores
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.plan.setup.placement import Placement
from batchinfer.plan.setup.setting import Setting


def worker_specs(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return a specification for each engine. A single process has its machine to itself."""
    division, machines = setting.placement.division, _machines(setting.placement)
    counts, begun, here = Counter(machines), Counter[int](), _here(job, setting, factory)
    asked = None if job.engine.threads == "auto" else job.engine.threads
    each = []
    for machine in machines:
        part = begun[machine]
        begun[machine] += 1
        if machine:
            place = EnginePlace(node=machine, part=(part, counts[machine]))
            each.append(replace(here[0], place=place, load=replace(here[0].load, threads=asked)))
        else:
            each.append(here[part])
    return [
        replace(each[first], division=division, others=tuple(each[first + 1 : first + division.ranks]))
        for first in range(0, len(each), division.ranks)
    ]


def _machines(placement: Placement) -> list[int]:
    """Return the machine of each rank of each engine, those of an engine beside each other; 0: this one."""
    division = placement.division
    if division.machines > 1:
        return [rank // division.ranks_here for rank in range(division.ranks)]
    engines = range(placement.replicas)
    return [engine % placement.machines for engine in engines for _ in range(division.ranks)]


def _here(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return the specification of each process of this machine."""
    load, placement = setting.load_config(job), setting.placement
    if placement.processes_here == 1:
        return [WorkerSpec(load, job.model.path, factory)]
    asked = None if job.engine.threads == "auto" else job.engine.threads
    return [
        WorkerSpec(replace(load, threads=threads), job.model.path, factory, place)
        for threads, place in zip(placement.thread_shares(asked), _places(placement), strict=True)
    ]


def _places(placement: Placement) -> list[EnginePlace]:
    """Return a place for each rank of each engine of this machine, those of an engine beside each other."""
    if placement.machine.device == "cuda":
        return [EnginePlace(gpu=gpu) for gpu in placement.gpus]
    return [EnginePlace(cores) for cores in divided_cores(placement.processes_here)]
