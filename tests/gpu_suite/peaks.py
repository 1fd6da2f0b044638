"""What this GPU reaches: large products in each dtype, large reads and copies. Every share is of these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from batchinfer.ops.peaks import measure_peaks
from tests.gpu_suite.case import the_clock
from tests.gpu_suite.clock import Call
from tests.gpu_suite.section import BANDWIDTH, Section

SIZE, TINY = 8192, 128  # M = N = K, as in batchinfer.ops.peaks
HIGH = ("bfloat16", "float16", "float32")
FP8 = "float8_e4m3fn"
FP8_CAPABILITY = (8, 9)  # the first with such tensor cores


def run(section: Section) -> None:
    """One result: FLOP/s (operations for int8) by dtype, and bytes/s. A rehearsal runs it and tells no number."""
    section.parts([("copy and floats", lambda: _high(section)), *_low(section)])


def _high(section: Section) -> dict[str, Any]:
    if section.setting.rehearsal:
        measure_peaks("cpu", ("float32",), size=TINY, stream_bytes=2**16)
        return {"kind": "peaks", "peaks": {}}
    found = measure_peaks(section.setting.kind, HIGH)
    detail: dict[str, Any] = {"device": found.name, "read_bytes_per_s": found.read_bytes_per_s}
    detail["copy_bytes_per_s"] = found.copy_bytes_per_s
    return {"kind": "peaks", "peaks": {**found.peak_flops, BANDWIDTH: found.bandwidth}, **detail}


def _low(section: Section) -> list[Any]:
    device = section.setting.device
    parts = [("int8", lambda: _product(section, "int8", int8_product(device, _size(section))))]
    if section.setting.rehearsal or torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        parts.append((FP8, lambda: _product(section, FP8, fp8_product(device, _size(section)))))
    return parts


def _size(section: Section) -> int:
    return TINY if section.setting.rehearsal else SIZE


def _product(section: Section, dtype: str, call: Call) -> dict[str, Any]:
    if section.setting.rehearsal:
        call()
        return {"kind": "peaks", "peaks": {}}
    seconds = the_clock(section.setting.device).times({dtype: call})[dtype].min_s
    return {"kind": "peaks", "peaks": {dtype: 2 * SIZE**3 / seconds}}


def int8_product(device: torch.device, size: int) -> Call:
    """x Wᵀ of random codes, in int32."""
    x, weight = (_codes(device, size) for _ in range(2))
    return lambda: torch._int_mm(x, weight.T)


def _codes(device: torch.device, size: int) -> Tensor:
    return torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device)


def fp8_product(device: torch.device, size: int) -> Call:
    """x Wᵀ of random values with one scale a tensor, in bfloat16: the fastest that cuBLAS has."""
    x, weight = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
