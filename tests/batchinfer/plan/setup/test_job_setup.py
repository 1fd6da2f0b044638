"""The number of render workers follows cores and memory, and on GPUs the engines keep their own cores."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.job import Job, ModelSection, OutputSection
from batchinfer.job.spec import InputSection
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer.plan.setup.job_setup import WORKER_BYTES, ingest_workers
from tests.settings import setting_of


@pytest.mark.parametrize(("asked", "device", "engines", "memory", "found"), [
    ("auto", "cpu", 1, 100, 16),
    ("auto", "cpu", 4, 100, 16),
    ("auto", "cuda", 1, 100, 15),
    ("auto", "cuda", 8, 100, 8),
    ("auto", "cuda", 16, 100, 1),
    ("auto", "cpu", 1, 3, 3),
    ("auto", "cpu", 1, 0, 1),
    (40, "cuda", 8, 3, 40),
])  # fmt: skip
def test_workers(asked: Any, device: Any, engines: int, memory: int, found: int) -> None:
    setting = setting_of(Hardware("a device", device, None, None), replicas=engines)
    reader = MachineFacts(Hardware("a CPU", "cpu", 16, None), cores=16, free_memory=memory * WORKER_BYTES + 1)
    job = Job(
        name="test",
        model=ModelSection.model_construct(path="model"),
        input=InputSection.model_construct(workers=asked),
        output=OutputSection.model_construct(path="results"),
    )
    assert ingest_workers(job, setting, reader) == found
