"""Tests that a call's time on a GPU is the device's, once the host has queued all of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from batchinfer.models.ops.queued_time import CYCLES_PER_S, QueuedTime


class FakeGpu:
    """A fake GPU that records calls in order. Queueing takes the host 2 ms, and running takes the device 0.5
    ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[str] = []
        self.now = self.asleep_s = 0.0
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.given.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)
        monkeypatch.setattr(torch.cuda, "Event", self.event)
        sizes = SimpleNamespace(L2_cache_size=4000)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: sizes)
        monkeypatch.setattr(
            torch, "zeros", lambda size, **kind: SimpleNamespace(sum=lambda: self.flush(size))
        )

    def flush(self, size: int) -> None:
        self.given.append(f"flush {4 * size}")

    def sleep(self, cycles: int) -> None:
        self.given.append("sleep")
        self.asleep_s = cycles / CYCLES_PER_S

    def event(self, enable_timing: bool = False) -> SimpleNamespace:
        assert enable_timing
        return SimpleNamespace(
            record=lambda: self.given.append("event"),
            synchronize=lambda: self.given.append("wait"),
            elapsed_time=lambda end: 0.5,
        )

    def call(self) -> None:
        self.given.append("call")
        self.now += 2e-3


def test_the_device_waits_until_the_host_has_queued_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    timer = QueuedTime(torch.device("cuda"), lambda: gpu.now)
    for _ in range(2):
        gpu.given.clear()
        assert timer.seconds_of(gpu.call) == 0.5e-3
        assert gpu.given == ["synchronize", "call", "flush 8000", "sleep", "event", "call", "event", "wait"]
        assert gpu.asleep_s > 2e-3


def test_on_a_cpu_the_time_is_the_calls() -> None:
    times = iter((1.0, 3.5))
    assert QueuedTime(torch.device("cpu"), lambda: next(times)).seconds_of(lambda: None) == 2.5
