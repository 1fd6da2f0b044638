"""The placement of a job's engines on cores, GPUs and nodes, and refused divisions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchinfer.core.errors import BatchInferError, CannotSplit, JobFileError, Unavailable
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.pipeline.workers.messages import EngineResources, WorkerSpec
from batchinfer.pipeline.workers.worker_specs import worker_specs
from batchinfer.plan.setup.resolve import resolve
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.plan.setup.test_resolve import CPU, job_of

GPU = Hardware("NVIDIA H100 80GB HBM3", "cuda", None, 80 << 30, {"bfloat16": 9e14}, 3e12, "datasheet")


GPUS = MachineFacts(GPU, cores=6, free_memory=90 << 30, gpus=("0", "1", "2"))
CORES = MachineFacts(CPU, cores=6, free_memory=90 << 30)


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Give each process one of eight cores."""
    cores = [(number,) for number in range(8)]
    monkeypatch.setattr("batchinfer.pipeline.workers.worker_specs.split_cores", lambda parts: cores[:parts])
    return cores


@pytest.mark.parametrize(("found", "asked", "gpus"), [
    ("012", "auto", ("0", "1", "2")),
    ("012", "2", ("0", "1")),
    ("31", "auto", ("3", "1")),
    ("2", "auto", ()),
    ("", "auto", ()),
    ("012", "1", ()),
])  # fmt: skip
def test_one_engine_a_gpu(
    tmp_path: Path, checkpoint: Checkpoint, found: str, asked: str, gpus: tuple[str, ...]
) -> None:
    job = job_of(tmp_path, ("engine.data_parallel", asked))
    setting = resolve(job, checkpoint, replace(GPUS, gpus=tuple(found)))
    assert (setting.placement.replicas, setting.placement.gpus) == (max(1, len(gpus)), gpus)
    specs = worker_specs(job, setting, "a:b")
    assert [spec.resources.gpu for spec in specs] == (list(gpus) or [None])
    assert setting.peaks == GPU.peaks(setting.numerics.dtype)
    config = setting.engine_config(job, 64)
    assert (config.kv_memory, config.memory) == (None, None)


def test_engines_share_a_cpu(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = [(0, 1), (2, 3), (4, 5)]
    monkeypatch.setattr("batchinfer.pipeline.workers.worker_specs.split_cores", lambda parts: cores[:parts])
    settings = (("engine.data_parallel", "3"), ("engine.threads", "5"), ("engine.kv_memory", "9GiB"))
    job = job_of(tmp_path, ("model.dtype", "bfloat16"), *settings)
    setting = resolve(job, checkpoint, CORES)
    config = setting.engine_config(job, 64)
    specs = worker_specs(job, setting, "a:b")
    assert [spec.resources for spec in specs] == [EngineResources(one) for one in cores]
    assert [spec.load.threads for spec in specs] == [1, 2, 2]
    assert (config.kv_memory, config.memory) == (3 << 30, 30 << 30)
    assert setting.peaks == Peaks(2e12 / 3, 1e10)
    assert resolve(job_of(tmp_path), checkpoint, CORES).placement.replicas == 1


def test_each_rank_has_a_place(tmp_path: Path, checkpoint: Checkpoint, eight: list[tuple[int, ...]]) -> None:
    divided = (("engine.data_parallel", "2"), ("engine.pipeline_parallel_size", "2"), ("engine.threads", "4"))
    job = job_of(tmp_path, ("model.dtype", "bfloat16"), *divided)
    setting = resolve(job, checkpoint, CORES)
    specs = worker_specs(job, setting, "a:b")
    assert [[one.resources.cores for one in (spec, *spec.others)] for spec in specs] == [
        eight[:2],
        eight[2:4],
    ]
    assert {one.load.threads for spec in specs for one in (spec, *spec.others)} == {1}
    assert {spec.division for spec in specs} == {setting.placement.division}
    assert setting.for_rows(1).placement.replicas == 1
    assert len(worker_specs(job, setting.for_rows(1), "a:b")[0].others) == 1
    on_gpus = job_of(tmp_path, ("model.dtype", "bfloat16"), ("engine.tensor_parallel_size", "2"))
    setting = resolve(on_gpus, checkpoint, GPUS)
    assert (setting.placement.replicas, setting.placement.gpus) == (1, ("0", "1"))  # two of three GPUs
    alone = GPU.peaks(setting.numerics.dtype)
    assert setting.peaks == alone.times(2)


@pytest.mark.parametrize(("asked", "room", "engines"), [
    ({}, 5, 5),
    ({"engines": "3"}, 5, 3),
    ({"engines": "{min: 4}"}, 2, 4),
    ({"engines": "{max: 4}"}, 9, 4),
])  # fmt: skip
def test_engines_of_a_cluster_have_a_share_each(
    tmp_path: Path, checkpoint: Checkpoint, asked: dict[str, str], room: int, engines: int
) -> None:
    """The node decides about cores. The threads of an engine follow from its share."""
    settings = [("ray.address", "auto"), *((f"ray.{name}", value) for name, value in asked.items())]
    job = job_of(tmp_path, ("model.dtype", "bfloat16"), ("engine.pipeline_parallel_size", "2"), *settings)
    setting = resolve(job, checkpoint, replace(CORES, cores=4, engines=room))
    specs = worker_specs(job, setting, "a:b")
    assert len(specs) == engines
    assert {len(spec.others) for spec in specs} == {1}
    assert {(one.resources, one.load.threads) for spec in specs for one in (spec, *spec.others)} == {
        (EngineResources(), 2)
    }
    assert setting.peaks == setting.placement.hardware.peaks(setting.numerics.dtype)
    assert setting.engine_config(job, 64).memory is None


@pytest.mark.parametrize(("settings", "refusal", "said"), [
    ({"tensor_parallel_size": 2, "deterministic": True}, Unavailable, "engine.expert_parallel_size keep the bits"),
    ({"tensor_parallel_size": 3}, CannotSplit, r"can be divided among 1, 2"),
    ({"pipeline_parallel_size": 5}, CannotSplit, r"engine.pipeline_parallel_size can be at most \d+"),
    ({"tensor_parallel_size": 2, "data_parallel": 3}, JobFileError, "3 engines of 2 ranks each need 6 cores"),
    ({"tensor_parallel_size": 2, "threads": 1}, JobFileError, "2 ranks need 2 cores"),
    ({"data_parallel": 5, "device": "cuda"}, JobFileError, "5 engines need 5 GPUs, but .* only 3"),
])  # fmt: skip
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, checkpoint: Checkpoint,
    settings: dict[str, Any], refusal: type[BatchInferError], said: str,
) -> None:  # fmt: skip
    job = job_of(tmp_path, *((f"engine.{name}", str(value).lower()) for name, value in settings.items()))
    with pytest.raises(refusal, match=said):
        resolve(job, checkpoint, GPUS if "device" in settings else replace(CORES, cores=4))


def test_a_single_engine_has_the_machine_to_itself(tmp_path: Path, checkpoint: Checkpoint) -> None:
    job = job_of(tmp_path)
    setting = resolve(job, checkpoint, CORES)
    config = setting.engine_config(job, 64)
    assert worker_specs(job, setting, "a:b") == [WorkerSpec(config.load, job.model.path, "a:b")]
    assert (config.load.threads, config.memory) == (None, None)


def test_promised_bits_come_from_gpus_of_one_kind(tmp_path: Path, checkpoint: Checkpoint) -> None:
    machine, deterministic = replace(GPUS, several_kinds=True), ("engine.deterministic", "true")
    assert resolve(job_of(tmp_path), checkpoint, machine).placement.replicas == 3
    with pytest.raises(JobFileError, match="all engines need GPUs of the same model"):
        resolve(job_of(tmp_path, deterministic), checkpoint, machine)
    alone = job_of(tmp_path, deterministic, ("engine.data_parallel", "1"))
    assert resolve(alone, checkpoint, machine).placement.replicas == 1
