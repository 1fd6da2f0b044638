"""`engine.device` and `engine.kv_memory` in bytes are compared with the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from batchinfer.core.errors import JobFileError, Unavailable
from batchinfer.engine.ranks.division import Division
from batchinfer.job import Job
from batchinfer.machine.hardware import Hardware
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.plan.setup.checks import check_device, check_kv_memory, kv_memory_warnings
from batchinfer.plan.setup.setting import PlacedModel, Setting
from tests.batchinfer.plan.setup.test_resolve import job_of
from tests.settings import changed, setting_of

MIB = 1 << 20
CPU = setting_of(Hardware("a CPU", "cpu", 2, 64 * MIB), "float32", free_memory=32 * MIB)
GPU = setting_of(Hardware("NVIDIA T4", "cuda", None, 64 * MIB), "float32", free_memory=8 * MIB)


def asking(folder: Path, size: str) -> Job:
    return job_of(folder, ("engine.kv_memory", size))


@pytest.mark.parametrize("setting", [CPU, GPU], ids=["cpu", "cuda"])
def test_more_than_memory_has_is_refused(setting: Setting, checkpoint: Checkpoint, tmp_path: Path) -> None:
    models = [PlacedModel(checkpoint, setting)]
    check_kv_memory(asking(tmp_path, "63MiB"), models)
    for size in ("64MiB", "900GiB"):  # weights need a part of the first size
        with pytest.raises(JobFileError, match=r"engine\.kv_memory: .* is more than .* use at most 63MiB"):
            check_kv_memory(asking(tmp_path, size), models)
    for size in ("0.9", "auto"):
        check_kv_memory(asking(tmp_path, size), models)
    unknown = changed(setting, hardware=replace(setting.placement.hardware, memory_bytes=None))
    check_kv_memory(asking(tmp_path, "900GiB"), [PlacedModel(checkpoint, unknown)])


def test_weights_count_for_each_engine_and_in_parts_for_ranks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    weights = PlacedModel(checkpoint, CPU).weight_bytes
    for setting, times in (
        (CPU, 1),
        (changed(CPU, replicas=3), 3),
        (changed(CPU, division=Division(2)), 1),
        (changed(GPU, replicas=3), 1),
    ):
        room = 64 * MIB - times * weights
        models = [PlacedModel(checkpoint, setting)]
        check_kv_memory(asking(tmp_path, f"{room >> 10}KiB"), models)
        with pytest.raises(JobFileError):
            check_kv_memory(asking(tmp_path, f"{(room >> 10) + 1}KiB"), models)


def test_more_than_is_free_now_is_a_warning(checkpoint: Checkpoint, tmp_path: Path) -> None:
    models = [PlacedModel(checkpoint, CPU)]
    assert kv_memory_warnings(asking(tmp_path, "31MiB"), models) == []
    (told,) = kv_memory_warnings(asking(tmp_path, "32MiB"), models)
    assert "more than the 32 MiB of memory that are free now" in told
    elsewhere = PlacedModel(checkpoint, changed(CPU, free_memory=None))
    assert kv_memory_warnings(asking(tmp_path, "32MiB"), [elsewhere]) == []


@pytest.mark.parametrize(("facts", "said"), [
    ({"torch_has_cuda": False, "has_gpu": True}, "the torch that is installed computes on CPUs only"),
    ({"torch_has_cuda": True, "has_gpu": False}, "this machine has no NVIDIA GPU"),
])  # fmt: skip
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, facts: dict[str, bool], said: str) -> None:
    job, here = job_of(tmp_path, ("engine.device", "cuda")), GPU.placement.machine
    check_device(job, here)
    with pytest.raises(Unavailable, match=said):
        check_device(job, replace(here, **facts))
    check_device(job_of(tmp_path), replace(here, **facts))
