"""As many processes read a job's rows as there are cores and memory for, and on GPUs the engines keep theirs."""

from __future__ import annotations

from typing import Any

import pytest

from batchinfer.job import Job, ModelSection, OutputSection
from batchinfer.job.spec import InputSection
from batchinfer.plan.setup import ingest_workers as counting
from batchinfer.plan.setup.ingest_workers import WORKER_BYTES, ingest_workers


class Device:
    def __init__(self, device: str, replicas: int) -> None:
        self.device, self.replicas = device, replicas


@pytest.mark.parametrize(
    ("asked", "device", "engines", "memory", "found"),
    [
        ("auto", "cpu", 1, 100, 16),
        ("auto", "cpu", 4, 100, 16),
        ("auto", "cuda", 1, 100, 15),
        ("auto", "cuda", 8, 100, 8),
        ("auto", "cuda", 16, 100, 1),
        ("auto", "cpu", 1, 3, 3),
        ("auto", "cpu", 1, 0, 1),
        (40, "cuda", 8, 3, 40),
    ],
)
def test_workers(
    monkeypatch: pytest.MonkeyPatch, asked: Any, device: str, engines: int, memory: int, found: int
) -> None:
    monkeypatch.setattr(counting, "usable_cpus", lambda: 16)
    monkeypatch.setattr(counting, "available_memory", lambda: memory * WORKER_BYTES + 1)
    job = Job(
        name="test",
        model=ModelSection.model_construct(path="model"),
        input=InputSection.model_construct(workers=asked),
        output=OutputSection.model_construct(path="results"),
    )
    assert ingest_workers(job, Device(device, engines)) == found  # type: ignore[arg-type]
