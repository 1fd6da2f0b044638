"""Measures the device time of calls that are fully queued before they start, as in the replay of a graph."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from batchinfer.models.ops.prompts.trial import Clock, seconds_of

QUEUE_MARGIN = 2.0  # the wait, relative to the host's time to queue a call
CYCLES_PER_S = 2.1e9  # clock of the fastest GPU: slower GPUs wait longer than necessary
FLUSHED = 2  # the size of the tensor that flushes the device's cache, relative to the cache


class QueuedTime:
    """Measures how long a device takes for the work that a call launches.

    On a GPU, the host's time for launches is not included, and the GPU's cache is flushed before the call.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter) -> None:
        self._device, self._clock = device, clock
        self._cold: torch.Tensor | None = None

    def seconds_of(self, run: Callable[[], object]) -> float:
        """Return the seconds that the device takes for a call.

        Args:
            run: The function to call. It must have been called before, so that compilation is not measured.
        """
        if self._device.type != "cuda":
            return seconds_of(run, self._device, self._clock)
        host_s = self._host_s(run)
        self._flush()
        keep_busy(round((QUEUE_MARGIN * host_s + 1e-4) * CYCLES_PER_S))
        start, end = timed_event(), timed_event()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _host_s(self, run: Callable[[], object]) -> float:
        torch.cuda.synchronize(self._device)
        began = self._clock()
        run()
        return self._clock() - began

    def _flush(self) -> None:
        # Written lines would be written back while the call is timed
        if self._cold is None:
            size = FLUSHED * int(torch.cuda.get_device_properties(self._device).L2_cache_size)
            self._cold = torch.zeros(max(size // 4, 1), dtype=torch.int32, device=self._device)
        self._cold.sum()


def timed_event() -> Any:
    """Return a CUDA event that records the time at which the current GPU reaches it."""
    event: Callable[..., Any] = torch.cuda.Event
    return event(enable_timing=True)


def keep_busy(cycles: int) -> None:
    """Launch a kernel that only waits, to keep a GPU busy.

    It uses the private `torch.cuda._sleep`, as torch's own tests do.

    Args:
        cycles: The number of clock cycles to wait.
    """
    sleep: Callable[[int], None] = torch.cuda._sleep
    sleep(cycles)
