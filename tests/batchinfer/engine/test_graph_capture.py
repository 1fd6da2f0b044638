"""Tests captures on a GPU: streams, errors and the garbage collector, with a fake CUDA."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from batchinfer.engine.graphs import graph_capture
from batchinfer.engine.graphs.graph_capture import GpuRecorder, NotCaptured

MAIN = "the current stream"


class Stream:
    def __init__(self, name: str = "side") -> None:
        self.name, self.waits_for = name, []

    def wait_stream(self, other: Stream) -> None:
        self.waits_for.append(other.name)


class Cuda:
    """The functions of torch.cuda that captures use.

    Attributes:
        ends_with: error at the end of a capture.
        starts_with: error at a graph's first launch.
    """

    Stream = Stream

    def __init__(self) -> None:
        self.main = self.stream_now = Stream(MAIN)
        self.called_elsewhere = False
        self.free_bytes, self.cached_bytes = 10 << 30, 0  # what torch keeps although nothing uses it
        self.pools: list[object] = []  # that were recorded to
        self.ended: list[object] = []  # the pools whose capture was ended after a failure
        self.ends_with: Exception | None = None
        self.starts_with: Exception | None = None
        self.launched_in: list[str] = []

    def mem_get_info(self) -> tuple[int, int]:
        return self.free_bytes, 80 << 30

    def current_device(self) -> int:
        return 0

    def end_pool(self, device: int, pool: object) -> None:
        """End the pool, as newer versions of torch do."""
        self.ended.append(pool)
        raise RuntimeError("not currently recording to mempool_id")

    def synchronize(self) -> None:
        """Everything has run by then."""

    def empty_cache(self) -> None:
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0

    def graph_pool_handle(self) -> object:
        return object()

    def current_stream(self) -> Stream:
        return self.stream_now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        try:
            yield
        finally:
            self.stream_now = before

    def CUDAGraph(self) -> Any:
        return Graph(self)

    @contextmanager
    def graph(
        self, graph: Any, pool: object, stream: Stream, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        """Capture like torch: empty the cache first, and do not leave the stream if the end fails."""
        self.empty_cache()
        self.pools.append(pool)
        before, self.stream_now, self.called_elsewhere = self.stream_now, stream, False
        try:
            yield
        finally:
            if self.ends_with is not None:
                raise self.ends_with
            if self.called_elsewhere and capture_error_mode == "global":
                raise torch.AcceleratorError("CUDA error: operation failed due to a previous error")
            self.stream_now = before

    def call_elsewhere(self) -> None:
        """Call a function of another thread that a capture would not allow, such as an allocation."""
        self.called_elsewhere = True


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        if self._cuda.starts_with is not None:
            raise self._cuda.starts_with
        self._cuda.free_bytes -= 5 * (not self._cuda.launched_in)  # a graph's own, with its first launch
        self._cuda.launched_in.append(self._cuda.stream_now.name)


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(graph_capture.torch, "cuda", made)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end_pool, raising=False)
    return made


def raising(error: Exception) -> Any:
    def run() -> None:
        raise error

    return run


def test_a_graph_is_launched_once_after_its_capture(cuda):
    """Device memory is then allocated before the job's steps."""
    ran_in: list[str] = []
    made, replay = GpuRecorder().record(lambda: ran_in.append(cuda.stream_now.name) or 3)
    assert (made, ran_in, cuda.launched_in) == (3, ["side"], [MAIN])
    replay()
    assert cuda.launched_in == [MAIN] * 2


def test_other_threads_break_no_capture(cuda):
    """Some steps are captured during the job, while other threads may allocate or copy."""
    GpuRecorder().record(cuda.call_elsewhere)
    assert cuda.launched_in == [MAIN]


def test_memory_of_captures_is_counted_also_after_a_failure(cuda):
    """The workspace of the library, the tensors of the graph and the graph itself are counted."""

    def allocate() -> None:
        cuda.free_bytes -= 100

    recorder = GpuRecorder()
    recorder.warm_up(allocate)
    recorder.record(allocate)
    assert recorder.taken_bytes == 205
    cuda.free_bytes -= 1000  # by others, between captures
    cuda.ends_with = torch.OutOfMemoryError("none left")
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(allocate)
    assert recorder.taken_bytes == 305


def test_torchs_cached_memory_is_not_counted(cuda):
    """A capture first returns torch's cached memory to the device."""

    def keep() -> None:
        cuda.free_bytes, cuda.cached_bytes = cuda.free_bytes - 7000, 7000

    recorder = GpuRecorder()
    keep()
    recorder.warm_up(keep)
    assert recorder.taken_bytes == 0
    keep()
    recorder.record(int)
    assert recorder.taken_bytes == 5, "the graph's own"


def test_the_pool_of_a_failed_capture_is_not_reused(cuda):
    """torch up to 2.12 treats the pool as if a capture still recorded to it. After an allocation failure the
    capture ends normally, and smaller captures reuse its memory."""
    recorder = GpuRecorder()
    with pytest.raises(torch.OutOfMemoryError):
        recorder.record(raising(torch.OutOfMemoryError("tried to allocate")))
    cuda.ends_with = torch.AcceleratorError(
        "CUDA error: operation failed due to a previous error during capture"
    )
    with pytest.raises(NotCaptured, match="previous error during capture"):
        recorder.record(int)
    cuda.ends_with = None
    recorder.record(int)
    assert cuda.pools[0] is cuda.pools[1] is not cuda.pools[2]
    assert cuda.ended == [cuda.pools[1]]
    with pytest.raises(NotCaptured, match="not permitted"):
        recorder.record(raising(RuntimeError("operation not permitted when stream is capturing")))
    assert cuda.stream_now is cuda.main


def test_nothing_is_collected_inside_a_capture(cuda):
    """Collected objects may unload device code, which ends the capture."""
    assert gc.isenabled()
    collecting, _ = GpuRecorder().record(gc.isenabled)
    assert not collecting
    assert gc.isenabled()
    with pytest.raises(ValueError, match="x"):
        GpuRecorder().record(raising(ValueError("x")))
    assert gc.isenabled()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("tried to allocate"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_all_out_of_memory_errors_are_recognised(cuda, error):
    """The error may come from the run before, the capture, the graph's creation or its first launch."""
    recorder = GpuRecorder()
    for run in (recorder.warm_up, recorder.record):
        with pytest.raises(torch.OutOfMemoryError):
            run(raising(error))
    for place in ("ends_with", "starts_with"):
        setattr(cuda, place, error)
        with pytest.raises(torch.OutOfMemoryError):
            recorder.record(int)
        setattr(cuda, place, None)
    assert cuda.stream_now is cuda.main


def test_an_aborted_capture_does_not_hide_an_out_of_memory_error(cuda):
    cuda.ends_with = torch.AcceleratorError("CUDA error: operation failed due to a previous error")
    with pytest.raises(torch.OutOfMemoryError):
        GpuRecorder().record(raising(torch.OutOfMemoryError("tried to allocate")))
    assert cuda.stream_now is cuda.main, "whatever runs next would run in the stream of captures"


def test_other_errors_of_captures_are_unchanged(cuda):
    for error in (torch.AcceleratorError("CUDA error: an illegal memory access"), ValueError("3 rows")):
        with pytest.raises(type(error), match=str(error)):
            GpuRecorder().record(raising(error))
        with pytest.raises(type(error), match=str(error)):
            GpuRecorder().warm_up(raising(error))
    assert cuda.main.waits_for == ["side"] * 2, "launches of the warm-up are waited for"
