"""Captures the launches of a function as a CUDA graph, which a single call of the host replays."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from batchinfer.engine.tensors.device_memory import is_out_of_memory, out_of_memory_errors
from batchinfer.machine.garbage import pause_garbage_collector

R = TypeVar("R")
Replay = Callable[[], None]
# Part of the messages of CUDA (errors 900 to 908) and torch about work that cannot be captured
CAPTURE = "captur"


@dataclass(frozen=True, slots=True)
class CapturedFunction:
    """A function whose kernel launches were captured.

    Attributes:
        result: The tensor that contains the function's result after each replay.
        replay: Launches the captured kernels again.
    """

    result: Tensor
    replay: Replay


class NotCaptured(RuntimeError):
    """Raised if a function cannot be captured as a CUDA graph, although it can run."""


# Runs a function and captures its launches. Raises torch.OutOfMemoryError and NotCaptured
Capture = Callable[[Callable[[], Tensor]], CapturedFunction]


class GraphRecorder(ABC):
    """Captures the kernel launches of functions. The captures are replayed in the order in which they were made."""

    @property
    @abstractmethod
    def taken_bytes(self) -> int:
        """The bytes of device memory that all captures so far take: graphs and their tensors."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run a function once before its capture. This compiles kernels and allocates the work spaces of libraries.

        Args:
            run: The function. Its result is ignored.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
        """

    @abstractmethod
    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """Capture the kernel launches of a function.

        The launches may also be executed once. Captures must be replayed in the order in which they were made.

        Args:
            run: The function.

        Returns:
            The result of the function, and a function that replays its launches.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
            NotCaptured: If the function cannot be captured.
        """

    def __call__(self, run: Callable[[], Tensor]) -> CapturedFunction:
        """Run a function once to warm up, then capture its kernel launches.

        Args:
            run: The function. It returns the tensor with its result.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
            NotCaptured: If the function cannot be captured.
        """
        self.warm_up(run)
        return CapturedFunction(*self.record(run))


class GpuRecorder(GraphRecorder):
    """Captures functions as CUDA graphs. All graphs share a memory pool and are captured in the same stream."""

    def __init__(self) -> None:
        # Shared: graphs run one at a time, and a result is read before the next graph runs
        self._pool = torch.cuda.graph_pool_handle()
        # One stream: libraries allocate a work space of tens of MiB per stream
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._taken = 0

    @property
    def taken_bytes(self) -> int:
        """The bytes of device memory that all captures so far take."""
        return self._taken

    @contextmanager
    def _measured(self) -> Iterator[None]:
        # The beginning of a capture releases torch's unused memory, too, so it is released before each measurement
        before = _free_bytes()
        try:
            yield
        finally:
            self._taken += before - _free_bytes()

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run a function once in the CUDA stream in which functions are captured.

        Args:
            run: The function. Its result is ignored.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
        """
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        try:
            with self._measured(), out_of_memory_errors(), torch.cuda.stream(self._side):
                run()
        finally:
            current.wait_stream(self._side)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """Capture the function `run` as a CUDA graph, and replay the graph once.

        The first replay allocates the graph's memory on the device, so an out-of-memory error occurs here and not in
        the middle of a job.

        Returns:
            The result of the function, and the function that replays the graph.

        Raises:
            torch.OutOfMemoryError: If there is not enough memory.
            NotCaptured: If the function cannot be captured.
        """
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # `torch.cuda.graph` does not restore the stream if the end of a capture fails
        with self._measured(), out_of_memory_errors(), pause_garbage_collector(), torch.cuda.stream(current):
            # CUDA calls of other threads do not break a thread-local capture
            recording = torch.cuda.graph(graph, self._pool, self._side, capture_error_mode="thread_local")
            with self._usable_pool(), recording:
                made = run()
            graph.replay()
        return made, graph.replay

    @contextmanager
    def _usable_pool(self) -> Iterator[None]:
        # Torch up to 2.12 would otherwise treat the pool as being captured to, and never release its memory
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            with suppress(RuntimeError):  # newer versions of torch have ended it already
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            self._pool = torch.cuda.graph_pool_handle()
            if is_out_of_memory(error) or CAPTURE not in str(error):
                raise
            # The original error is the context: ending the broken capture raised another one
            raise NotCaptured(str(error.__context__ or error)) from error


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])
