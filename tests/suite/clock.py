"""Times calls on the device with CUDA events and a cold cache, in turns with their competitors.

Before each timed call the cache is flushed by reading a buffer several times its size: written lines would be
written back during the call. The device waits until the host has queued the whole call: the time is the
device's, not Python's. The host's time is recorded separately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch

from batchinfer.models.ops.queued_time import keep_busy, timed_event
from tests.suite.section import Times
from tests.suite.turns import in_turns

Call = Callable[[], Any]
COLD_BYTES = 512 * 2**20  # four times the largest L2 of current GPUs (126 MB, B200)
LEAST_TURNS, MOST_TURNS = 5, 20
TIMED_S = 0.25  # seconds of device time per call, which decide the number of turns
QUEUE_MARGIN = 2.0  # times the host's time for a call
SLEEP_CYCLES = 20_000_000  # about ten milliseconds, to measure the duration of a cycle


class DeviceClock:
    """Times calls on the present GPU."""

    def __init__(self, device: torch.device) -> None:
        self._cold = torch.zeros(COLD_BYTES // 4, dtype=torch.int32, device=device)
        keep_busy(SLEEP_CYCLES)
        cycles_s = self._device_s(lambda: keep_busy(SLEEP_CYCLES))
        self._cycles_per_s = SLEEP_CYCLES / cycles_s

    def times(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        """Return median times over turns in which each call runs once. Warm-up runs, which compile, do not count."""
        hosts = {name: self._host_s(call) for name, call in calls.items()}
        timed = {name: partial(self._cold_s, call, hosts[name]) for name, call in calls.items()}
        longest = max(call(0) for call in timed.values())
        turns = round(min(max(TIMED_S / longest, LEAST_TURNS), MOST_TURNS))
        return {name: Times.of(runs, hosts[name]) for name, runs in in_turns(timed, turns).items()}

    def _host_s(self, call: Call) -> float:
        for _ in range(2):  # compiles, and fills the allocator's pool
            call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        taken = time.perf_counter() - began
        torch.cuda.synchronize()
        return taken

    def _cold_s(self, call: Call, host_s: float, _: int) -> float:
        self._cold.sum()
        keep_busy(round((QUEUE_MARGIN * host_s + 1e-4) * self._cycles_per_s))
        return self._device_s(call)

    @staticmethod
    def _device_s(call: Call) -> float:
        start, end = timed_event(), timed_event()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class HostClock:
    """Times calls once by the host's clock, for rehearsals. The record keeps no times."""

    def times(self, calls: Mapping[str, Call]) -> dict[str, Times]:
        """Run each call once."""
        return {name: Times.of([self._host_s(call)]) for name, call in calls.items()}

    @staticmethod
    def _host_s(call: Call) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began


@cache
def the_clock(device: torch.device) -> DeviceClock | HostClock:
    """Return the clock that all parts share: a GPU's clock has a large buffer."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has executed its queue. Returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()
