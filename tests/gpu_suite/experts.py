"""Experts of the shape of gpt-oss-20b in MXFP4, beside the same that were widened before."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from batchinfer_kernels.cost import mxfp4_grouped_linear_cost
from batchinfer_kernels.gpu.grouped_coded_matmul import grouped_mxfp4_matmul
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.mxfp4 import GROUP, mxfp4_values, packed_mxfp4
from tests.gpu_suite.case import TOLERANCE, Case, distance, measured
from tests.suite.section import BenchSection, Part

EXPERTS, CHOSEN, INPUTS, OUTPUTS = 32, 4, 2880, 5760
TOKENS = (16, 256, 4096)  # a tail, decode, prefill


def parts(section: BenchSection) -> list[Part]:
    """Gate and up of a layer, at one step of each kind."""
    sizes = [(4, 64, 48, 3)] if section.rehearsal else [(EXPERTS, INPUTS, OUTPUTS, n) for n in TOKENS]
    return [_part(section, *size) for size in sizes]


def _part(section: BenchSection, experts: int, inputs: int, outputs: int, tokens: int) -> Part:
    size = f"experts {tokens} × {CHOSEN} of {experts} × {inputs} × {outputs}"
    made = partial(mxfp4_case, section, size, experts, inputs, outputs, tokens)
    return f"mxfp4 {size}", lambda: measured(section, made())


def mxfp4_case(
    section: BenchSection, size: str, experts: int, inputs: int, outputs: int, tokens: int
) -> Case:
    """Rows are spread evenly. What is right are products of the widened weights."""
    device, rows = section.device, tokens * CHOSEN
    codes = torch.randint(0, 256, (experts, outputs, inputs // 2), device=device, dtype=torch.uint8)
    shape = (experts, outputs, inputs // GROUP)
    exponents = torch.randint(118, 122, shape, device=device, dtype=torch.uint8)
    x = torch.randn(rows, inputs, device=device, dtype=torch.bfloat16)
    starts = torch.arange(experts + 1, device=device) * rows // experts
    packed, wide = packed_mxfp4(codes, exponents), _widened(codes, exponents)
    ours, theirs = partial(grouped_mxfp4_matmul, x, packed, starts), partial(grouped_matmul, x, wide, starts)
    cost = mxfp4_grouped_linear_cost(rows, min(rows, experts), inputs, outputs, x.element_size())
    others = {"widened before": theirs}
    return Case(
        "mxfp4 experts",
        size,
        cost,
        "bfloat16",
        ours,
        lambda: distance(ours(), theirs()),
        TOLERANCE[x.dtype],
        others,
    )


def _widened(codes: Tensor, exponents: Tensor) -> Tensor:
    """Of one expert after the other: float32 copies of all of them would take gigabytes."""
    each = (mxfp4_values(codes[e : e + 1], exponents[e : e + 1]).bfloat16() for e in range(len(codes)))
    return torch.cat(list(each))
