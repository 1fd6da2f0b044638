"""The peaks of this GPU: large products in each dtype, large reads and copies. Shares refer to these peaks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from batchinfer.models.ops.peaks import STREAM_BYTES
from tests.suite.clock import Call, the_clock
from tests.suite.section import BANDWIDTH, BenchSection, Part, Result

SIZE, TINY = 8192, 128  # M = N = K, as in batchinfer.models.ops.peaks
TINY_STREAM = 2**16  # bytes
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = "float8_e4m3fn"
FP8_CAPABILITY = (8, 9)  # the first with such tensor cores


def parts(section: BenchSection) -> list[Part]:
    """Return a part per dtype (FLOP/s; int8: operations/s), and one each for reading and copying (bytes/s)."""
    size = TINY if section.rehearsal else SIZE
    makers: dict[str, Callable[..., Call]] = {
        str(dtype).removeprefix("torch."): partial(float_product, dtype=dtype) for dtype in FLOATS
    }
    makers["int8"] = int8_product
    if section.rehearsal or torch.cuda.get_device_capability() >= FP8_CAPABILITY:
        makers[FP8] = fp8_product
    products: list[Part] = [
        (name, partial(_measured, section, name, partial(make, section.device, size), 2 * size**3))
        for name, make in makers.items()
    ]
    moved = TINY_STREAM if section.rehearsal else STREAM_BYTES["cuda"]
    source = partial(torch.ones, moved // 4, device=section.device)
    return [
        *products,
        ("read", partial(_measured, section, BANDWIDTH, lambda: source().sum, moved)),
        (
            "copy",
            partial(_measured, section, BANDWIDTH, lambda: partial(source().copy_, source()), 2 * moved),
        ),
    ]


def _measured(section: BenchSection, name: str, make: Callable[[], Call], work: int) -> Result:
    """Measure the FLOPs or bytes per second of a call. The maximum counts: other users only slow the machine down."""
    seconds = the_clock(section.device).times({name: make()})[name].min_s
    return Result(f"peak of {name}", metrics={name: work / seconds})


def float_product(device: torch.device, size: int, dtype: torch.dtype) -> Call:
    """Return x Wᵀ of normal numbers. With zeros, a GPU would clock higher than in a run."""
    x, weight = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return lambda: torch.nn.functional.linear(x, weight)


def int8_product(device: torch.device, size: int) -> Call:
    """Return x Wᵀ of random int8 values, in int32."""
    x, weight = (torch.randint(-127, 128, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    return lambda: torch._int_mm(x, weight.T)


def fp8_product(device: torch.device, size: int) -> Call:
    """Return x Wᵀ of random values with one scale per tensor, in bfloat16: cuBLAS's fastest product."""
    x, weight = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(x, weight.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
