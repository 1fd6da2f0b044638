"""CUDA graphs: what a function launches is recorded once, and launched again by one call of the host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

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
        do."""

    @abstractmethod
    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        """(what the function returned, how to launch again what it launched). Nothing has been computed. Memory that it
        took and gave back is used again by what is recorded later, and must be replayed later."""

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
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            run()
        torch.cuda.current_stream().wait_stream(self._side)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._side):
            made = run()
        return made, graph.replay
