"""CUDA graphs: what a function launches is recorded once, and launched again by one call of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from batchinfer.engine.tensors.device_memory import is_out_of_memory, out_of_memory_errors
from batchinfer.machine.garbage import not_collecting

R = TypeVar("R")
Replay = Callable[[], None]
CAPTURE = "captur"  # in what CUDA (errors 900 to 908) and torch say of work that no capture may have


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured function: the tensor that holds its result after each replay, and how to replay it."""

    result: Tensor
    replay: Replay


class NotCaptured(RuntimeError):
    """A function cannot be captured, although it runs: an operator of a library does what no graph can repeat."""


# Runs a function and captures what it launches. Raises torch.OutOfMemoryError, and NotCaptured.
Capture = Callable[[Callable[[], Tensor]], Captured]


class GraphRecorder(ABC):
    """Captures functions, whole or one after the other where a later one reads what an earlier one has made."""

    @property
    @abstractmethod
    def taken_bytes(self) -> int:
        """How much of the device's memory captures have taken so far: the graphs, and what their tensors lie in."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run what is recorded next: compiles kernels and makes the libraries' work spaces, which a capture must not
        do. Raises torch.OutOfMemoryError."""

    @abstractmethod
    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """Return (what the function returned, how to launch again what it launched). The function may have been
        launched by now, once everything that was recorded before was. Memory that it took and gave back is used again
        by what is recorded later, and must be replayed later. Raises torch.OutOfMemoryError, and NotCaptured."""

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """Warm up, then capture, as `Capture` says."""
        self.warm_up(run)
        return Captured(*self.record(run))


class GpuRecorder(GraphRecorder):
    """Captures by CUDA.

    Graphs share a memory pool: one runs at a time, and its result is read before the next. They are captured in one
    stream: libraries keep a work space of tens of MiB for each stream that they are called in. What other threads of
    the process call meanwhile breaks no capture (`thread_local`), as some are captured in mid-job.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._taken = 0

    @property
    def taken_bytes(self) -> int:
        return self._taken

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Counts what the device has less of afterwards. Another program on the same device may disturb that.

        Memory that torch keeps although nothing uses it is given back before each look at the device: the beginning of
        a capture does that, too, and would be taken for what the capture gave back."""
        before = _free_bytes()
        try:
            yield
        finally:
            self._taken += before - _free_bytes()

    def warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        try:
            with self._measured(), out_of_memory_errors(), torch.cuda.stream(self._side):
                run()
        finally:
            current.wait_stream(self._side)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """Record and launch once: a graph gets its memory on the device when it is first launched, so that is done
        here, where a lack of it is expected, and not in mid-job."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # `torch.cuda.graph` stays in its stream where the end of a capture fails
        with self._measured(), out_of_memory_errors(), not_collecting(), torch.cuda.stream(current):
            recording = torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local")
            with self._usable_pool(), recording:
                made = run()
            graph.replay()
        return made, graph.replay

    @contextmanager
    def _usable_pool(self) -> Iterator[None]:
        """Takes another pool of memory for later captures where one fails for anything but the allocator's lack of
        memory: torch up to 2.12 then takes the pool for one that a capture still records to, and while one does, its
        allocator gives nothing back to the device."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            with suppress(RuntimeError):  # newer versions have ended it
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            if is_out_of_memory(error) or CAPTURE not in str(error):
                raise
            # The end of a capture that was cut short hides what did it
            raise NotCaptured(str(error.__context__ or error)) from error


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
