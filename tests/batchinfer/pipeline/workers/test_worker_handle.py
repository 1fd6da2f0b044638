"""The driver's end of an engine's process: messages sent before a failure are received."""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import numpy as np
import pytest

from batchinfer.core.errors import BatchInferError
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import EngineConfig, LoadConfig, Untimed
from batchinfer.pipeline.workers.messages import WorkerSpec
from batchinfer.pipeline.workers.transport import PROCESSES
from batchinfer.pipeline.workers.worker_handle import WorkerHandle
from tests import fake_engine
from tests.patience import PATIENCE_S

LOAD = LoadConfig(Path("model"), "float32", "cpu")


class FailsInItsSecondStep(fake_engine.FakeEngine):
    """Finishes its requests in one step, and fails in the next."""

    @property
    def unfinished(self) -> int:
        return 1 if self._steps else len(self._waiting)

    def step(self) -> fake_engine.FakeOutput:
        if self._steps:
            raise MemoryError("none left")
        return super().step()


class FailingWeights(fake_engine.FakeWeights):
    def engine(self, config: EngineConfig, *_: object) -> fake_engine.BuiltFake:
        return fake_engine.BuiltFake(FailsInItsSecondStep(), super().engine(config).info)


def failing(load: LoadConfig, constraints: object, untimed: Untimed) -> FailingWeights:
    return FailingWeights(load, untimed, fake_engine.end_process, mortal=False)


def tells_of_teardown(load: LoadConfig, *_: object) -> fake_engine.FakeWeights:
    """Load weights. If Python's teardown runs in this process, it exits with code 7."""
    atexit.register(os._exit, 7)
    return fake_engine.build(load)


def test_a_finished_worker_exits_without_teardown() -> None:
    """Teardown of torch and CUDA takes seconds of cores and memory that publishing could use."""
    with WorkerHandle(
        WorkerSpec(LOAD, None, "tests.batchinfer.pipeline.workers.test_worker_handle:tells_of_teardown"),
        PROCESSES,
    ) as host:
        host.configure(EngineConfig(LOAD, max_model_len=64, longest=64))
        while host.info is None:
            host.receive(0.1)
        host.finish(1.0)
        while not host.left:
            host.receive(0.1)
        ended = host.link.wait(PATIENCE_S)
    assert ended is not None
    assert ended.code == 0


def receive_for_ever(host: WorkerHandle, done: list[bytes]) -> None:
    while True:
        done += [c.key for p in host.receive(0.1) for c in p.completions]


def test_what_was_finished_before_a_failure_is_received_before_the_failure():
    requests = [Request(bytes([i] * 32), np.array([1, 2], np.int32), SamplingParams()) for i in range(5)]
    with WorkerHandle(
        WorkerSpec(LOAD, None, "tests.batchinfer.pipeline.workers.test_worker_handle:failing"), PROCESSES
    ) as host:
        host.configure(EngineConfig(LOAD, max_model_len=64, longest=64))
        while host.info is None:
            host.receive(0.1)
        host.submit(requests)
        host.link.wait(PATIENCE_S)
        host.submit(requests)  # the dead process does not read it
        done: list[bytes] = []
        with pytest.raises(BatchInferError, match="out of memory") as caught:
            receive_for_ever(host, done)
    assert caught.value.exit_code == 71
    assert sorted(done) == [r.key for r in requests]
