"""The engines of a run, and what each of them gets of the machine."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.job import Job
from batchinfer.machine.cpus import divided_cores
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.plan.setup.resolve import Setting, thread_shares


def worker_specs(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return a specification for each engine. A single process has the machine to itself."""
    load, ranks = setting.load_config(job), setting.division.ranks
    if setting.replicas * ranks == 1:
        return [WorkerSpec(load, job.model.path, factory)]
    asked = None if job.engine.threads == "auto" else job.engine.threads
    shares = zip(thread_shares(asked, setting.replicas * ranks), _places(setting), strict=True)
    each = [
        WorkerSpec(replace(load, threads=threads), job.model.path, factory, place)
        for threads, place in shares
    ]
    return [
        replace(each[first], division=setting.division, others=tuple(each[first + 1 : first + ranks]))
        for first in range(0, len(each), ranks)
    ]


def _places(setting: Setting) -> list[EnginePlace]:
    """Return a place for each rank of each engine, those of an engine beside each other."""
    if setting.device == "cuda":
        return [EnginePlace(gpu=gpu) for gpu in setting.gpus]
    return [EnginePlace(cores) for cores in divided_cores(setting.replicas * setting.division.ranks)]
