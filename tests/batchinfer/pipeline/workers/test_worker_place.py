"""A worker uses only its share of the machine, also while it imports."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from batchinfer.machine.cpus import usable_cpus
from batchinfer.pipeline.workers.endings import restrict_process
from batchinfer.pipeline.workers.messages import EngineResources


@pytest.fixture
def restored() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")
@pytest.mark.usefixtures("restored")
def test_a_worker_is_bound_to_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    restrict_process(EngineResources((core,)))
    assert os.sched_getaffinity(0) == {core}
    assert usable_cpus() == 1


@pytest.mark.parametrize(("before", "order"), [(None, "PCI_BUS_ID"), ("3,1", None)])
def test_a_worker_sees_only_its_gpu(
    monkeypatch: pytest.MonkeyPatch, before: str | None, order: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {} if before is None else {"CUDA_VISIBLE_DEVICES": before})
    restrict_process(EngineResources(gpu="1"))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert os.environ.get("CUDA_DEVICE_ORDER") == order
    restrict_process(EngineResources())
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
