"""CUDA graphs: what a function launches is recorded once, and launched again by one call of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from batchinfer.engine.garbage import not_collecting

R = TypeVar("R")
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Captured:
    """A captured function: the tensor that holds its result after each replay, and how to replay it."""

    result: Tensor
    replay: Replay


# Runs a function and captures what it launches. Raises torch.OutOfMemoryError.
Capture = Callable[[Callable[[], Tensor]], Captured]


class GraphRecorder(ABC):
    """Captures functions, whole or one after the other where a later one reads what an earlier one has made."""

    @abstractmethod
    def warm_up(self, run: Callable[[], object]) -> None:
        """Run what is recorded next: compiles kernels and makes the libraries' work spaces, which a capture must not
        do. Raises torch.OutOfMemoryError."""

    @abstractmethod
    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """(what the function returned, how to launch again what it launched). It may have been launched by now, once
        everything that was recorded before was. Memory that it took and gave back is used again by what is recorded
        later, and must be replayed later. Raises torch.OutOfMemoryError."""

    def __call__(self, run: Callable[[], Tensor]) -> Captured:
        """See Capture."""
        self.warm_up(run)
        return Captured(*self.record(run))


class GpuRecorder(GraphRecorder):
    """Graphs share a memory pool: one runs at a time, and its result is read before the next. They are captured in one
    stream: libraries keep a work space of tens of MiB for each stream that they are called in."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], object]) -> None:
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        try:
            with lack_of_memory(), torch.cuda.stream(self._side):
                run()
        finally:
            current.wait_stream(self._side)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """A graph gets its memory on the device when it is first launched, so that is done here, where a lack of it is
        expected, and not in mid-job."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # `torch.cuda.graph` stays in its stream where the end of a capture fails
        with lack_of_memory(), not_collecting(), torch.cuda.stream(current):
            with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
                made = run()
            graph.replay()
        return made, graph.replay


@contextmanager
def lack_of_memory() -> Iterator[None]:
    """Raises torch.OutOfMemoryError for every error inside that comes of a lack of memory: the driver, Triton and the
    libraries have errors of their own for it, and that of a capture that was cut short hides it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if not any(map(_lacks_memory, _chain(error))):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those in whose handling it came up."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _lacks_memory(error: BaseException) -> bool:
    """cuBLAS says CUBLAS_STATUS_ALLOC_FAILED, the others say it in words."""
    known = isinstance(error, torch.OutOfMemoryError)
    return known or "out of memory" in str(error) or "ALLOC_FAILED" in str(error)
