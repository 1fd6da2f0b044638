"""Measures the peak FLOP/s and bandwidth of this machine.

The peak of a dtype is the best of 20 packed GEMMs, with the faster of torch's libraries and the compiled operators.
Bandwidth is measured with large reads and copies. It takes a few seconds per device. Peaks are too low if the machine
is busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from batchinfer.core.errors import Unavailable
from batchinfer.models.ops.products import Multiplier, compiled_operators, onednn_has_int8, products

GEMM_TRIES = 20
STREAM_TRIES = 10
FIRST_WITH_FP8 = (8, 9)  # the first compute capability whose tensor cores know float8_e4m3fn
# M = N = K. At 790 TFLOP/s a 2048 GEMM takes 22 µs, not much above a launch; an 8192 one takes 1.4 ms.
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
# (inputs, outputs) of the products of a layer of `llama-135m`, the benchmark's model; enough layers to exceed the
# caches; and the rows of a step
LAYER, LAYERS, LAYER_ROWS = ((576, 960), (576, 576), (576, 3072), (1536, 576)), 12, 128
LAYER_TRIES = 5
# At least 16 times the last-level cache of usual machines (32 MiB on two EPYC cores, 50 MiB on an H200)
STREAM_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}


@dataclass(frozen=True, slots=True)
class MeasuredPeaks:
    """The measured peaks of a device: the highest rates of operations and of memory traffic.

    Attributes:
        name: The GPU's name as torch and nvidia-smi print it. None: the device is a CPU.
        peak_flops: FLOP/s, or integer operations per second, by dtype name.
        read_bytes_per_s: The bandwidth of reads.
        copy_bytes_per_s: The bandwidth of copies: bytes read plus bytes written, per second.
        seconds: The duration of the measurement.
        peak_by: The library that reached the peak ("torch" or "compiled"), by dtype name.
        rates: The operations per second of every library, by dtype name.
    """

    name: str | None
    peak_flops: dict[str, float]
    read_bytes_per_s: float
    copy_bytes_per_s: float
    seconds: float
    peak_by: dict[str, str] = field(default_factory=dict)
    rates: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def bandwidth(self) -> float:
        """Return the bandwidth of reads or of copies, whichever is larger, in bytes per second."""
        return max(self.read_bytes_per_s, self.copy_bytes_per_s)


def dtypes_of(device: str) -> tuple[str, ...]:
    """Return the names of the dtypes whose matrix products are measured on a device; int8 and fp8 if it supports them.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    where = torch.device(device)
    if where.type == "cuda":
        knows_fp8 = torch.cuda.get_device_capability(where) >= FIRST_WITH_FP8
        return ("bfloat16", "float16", "float32", "int8", *(("fp8",) if knows_fp8 else ()))
    if onednn_has_int8() or compiled_operators() is not None:
        return ("bfloat16", "float32", "int8")
    return ("bfloat16", "float32")


def measure_peaks(
    device: str,
    dtypes: tuple[str, ...] | None = None,
    *,
    size: int | None = None,
    stream_bytes: int | None = None,
) -> MeasuredPeaks:
    """Measure the peaks of a device with the current number of threads.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        dtypes: The dtypes to measure. None: all of `dtypes_of`.
        size: M, N and K of the matrix products. None: GEMM_SIZE.
        stream_bytes: The number of bytes to read and to copy. None: STREAM_BYTES.

    Raises:
        Unavailable: torch does not find this GPU.
        ValueError: `device` is neither a CPU nor a CUDA device.
    """
    where = _reachable(device)
    began = time.perf_counter()
    m = size or GEMM_SIZE[where.type]
    with torch.inference_mode():
        rates = {name: _gemm_rates(where, name, m) for name in dtypes or dtypes_of(device)}
        read, copy = _stream_peaks(where, stream_bytes or STREAM_BYTES[where.type])
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else None
    by = {dtype: max(found, key=lambda who: found[who]) for dtype, found in rates.items()}
    flops = {dtype: found[by[dtype]] for dtype, found in rates.items()}
    return MeasuredPeaks(name, flops, read, copy, time.perf_counter() - began, by, rates)


def _reachable(device: str) -> torch.device:
    where = torch.device(device)
    if where.type not in GEMM_SIZE:
        raise ValueError(f"device is {device!r}; peaks are measured on 'cpu', 'cuda' and 'cuda:N'")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise Unavailable(
            f"{device}: this torch ({torch.__version__}) finds {torch.cuda.device_count()} GPUs"
        )
    return where


def measure_layers(dtypes: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """Return the operations per second of a small model's layers on the CPU, by dtype and library.

    These rates are below the peaks of large matrix products, because the matrices are small and weights are read from
    memory.

    Args:
        dtypes: The names of the dtypes to measure.
    """
    cpu = torch.device("cpu")
    with torch.inference_mode():
        return {dtype: _layer_rates(cpu, dtype) for dtype in dtypes}


def _layer_rates(cpu: torch.device, dtype: str) -> dict[str, float]:
    calls = dict[Multiplier, list[Callable[[], Tensor]]]()
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in LAYER * LAYERS:
        x, weight = (_matrix(generator, dtype, rows, inputs) for rows in (LAYER_ROWS, outputs))
        for by, call in products(x, weight):
            calls.setdefault(by, []).append(call)
    operations = 2 * LAYER_ROWS * LAYERS * sum(inputs * outputs for inputs, outputs in LAYER)
    return {by: operations / _best(partial(_all, own), cpu, LAYER_TRIES) for by, own in calls.items()}


def _all(calls: list[Callable[[], Tensor]]) -> None:
    for call in calls:
        call()


def _gemm_rates(where: torch.device, dtype: str, size: int) -> dict[str, float]:
    # Data is random, since zeros let a GPU clock higher
    generator = torch.Generator(device=where).manual_seed(0)
    x, weight = (_matrix(generator, dtype, size, size) for _ in range(2))
    return {by: 2 * size**3 / _best(call, where, GEMM_TRIES) for by, call in products(x, weight)}


def _matrix(generator: torch.Generator, dtype: str, rows: int, columns: int) -> Tensor:
    shape, where = (rows, columns), generator.device
    if dtype == "int8":
        return torch.randint(-127, 128, shape, generator=generator, device=where, dtype=torch.int8)
    kind = torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)
    return torch.randn(shape, generator=generator, device=where).to(kind)


def _stream_peaks(where: torch.device, size: int) -> tuple[float, float]:
    # A sum is faster than max, dot and matrix-vector products
    source = torch.ones(size // 4, device=where)
    target = torch.empty_like(source)
    read = _best(source.sum, where, STREAM_TRIES)
    copy = _best(lambda: target.copy_(source), where, STREAM_TRIES)
    moved = source.numel() * source.element_size()
    return moved / read, 2 * moved / copy


def _best(call: Callable[[], object], where: torch.device, tries: int) -> float:
    _timed(call, where)
    return min(_timed(call, where) for _ in range(tries))


def _timed(call: Callable[[], object], where: torch.device) -> float:
    _wait(where)
    began = time.perf_counter()
    call()
    _wait(where)
    return time.perf_counter() - began


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize(where)
