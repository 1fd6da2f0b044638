"""The engines of a run, and what each of them gets of the machine."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.job import Job
from batchinfer.machine.cpus import divided_cores
from batchinfer.pipeline.workers.messages import EnginePlace, WorkerSpec
from batchinfer.plan.setup.resolve import Setting, thread_shares


def worker_specs(job: Job, setting: Setting, factory: str) -> list[WorkerSpec]:
    """Return a specification for each engine. A single engine has the machine to itself."""
    load = setting.load_config(job)
    if setting.replicas == 1:
        return [WorkerSpec(load, job.model.path, factory)]
    asked = None if job.engine.threads == "auto" else job.engine.threads
    shares = zip(thread_shares(asked, setting.replicas), _places(setting), strict=True)
    return [
        WorkerSpec(replace(load, threads=threads), job.model.path, factory, place)
        for threads, place in shares
    ]


def _places(setting: Setting) -> list[EnginePlace]:
    if setting.device == "cuda":
        return [EnginePlace(gpu=gpu) for gpu in setting.gpus]
    return [EnginePlace(cores) for cores in divided_cores(setting.replicas)]
