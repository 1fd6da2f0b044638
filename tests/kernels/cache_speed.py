"""How long attention over a cache of int8 codes takes beside one of values, in bfloat16, the two in turns.

`python -m tests.kernels.cache_speed` prints for each shape the fastest of both, and the median of codes ÷ values.
The last two shapes are of prompts, and of contexts so short that codes save little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from batchinfer_kernels.cpu.attention_plan import attention_items
from batchinfer_kernels.cpu.compiled import CompiledOperators
from batchinfer_kernels.paged_attention import ScoreRules

BLOCK, ROUNDS = 16, 11
OUT_OF_CACHE = 150e6  # bytes of values: with several layers of few, so that none is still in the L3 cache


@dataclass(frozen=True)
class Shape:
    """`queries` of each row, the last of its context."""

    rows: int
    context: int
    kv_heads: int
    group: int
    dim: int
    queries: int = 1

    @property
    def values_bytes(self) -> int:
        """K and V of all rows."""
        return self.rows * self.context * self.kv_heads * self.dim * 4

    @property
    def codes_bytes(self) -> int:
        """The same as codes, with their scales."""
        return self.rows * self.context * self.kv_heads * (self.dim + 4) * 2


SHAPES = (
    Shape(16, 3072, 3, 3, 64),
    Shape(16, 3072, 2, 7, 64),
    Shape(8, 3072, 8, 4, 128),
    Shape(2, 1024, 3, 3, 64, queries=512),
    Shape(64, 96, 3, 3, 64),
)


def layers(
    compiled: CompiledOperators, shape: Shape
) -> list[tuple[Callable[[], object], Callable[[], object]]]:
    """Attention of as many layers as memory has to be read for, over values and over codes."""
    a_row = -(-shape.context // BLOCK)
    blocks = shape.rows * a_row
    table = torch.randperm(blocks).view(shape.rows, a_row).to(torch.int32)
    laid = (blocks, *compiled.cache_shape(shape.kv_heads, BLOCK, shape.dim))
    q = torch.randn(shape.rows * shape.queries, shape.kv_heads * shape.group, shape.dim).bfloat16()
    step = (
        BLOCK,
        table,
        attention_items([shape.queries] * shape.rows, [shape.context] * shape.rows, shape.group),
    )
    found = []
    for _ in range(max(1, int(OUT_OF_CACHE / shape.values_bytes)) if shape.queries == 1 else 1):
        k, v = (torch.randn(laid).bfloat16() for _ in range(2))
        coded_k, coded_v = (torch.randint(-127, 128, laid, dtype=torch.int8) for _ in range(2))
        scales = (torch.rand(laid[:3]) * 0.02, torch.rand(laid[:3]) * 0.02)
        found.append(
            (
                lambda k=k, v=v: compiled.paged_attention(q, k, v, *step, ScoreRules(0.125)),
                lambda k=coded_k, v=coded_v, s=scales: compiled.paged_attention(
                    q, k, v, *step, ScoreRules(0.125), scales=s
                ),
            )
        )
    return found


def seconds(calls: list[Callable[[], object]]) -> float:
    """Of each of them, in the mean."""
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)


def main() -> None:
    compiled = CompiledOperators(codes=True)
    for shape in SHAPES:
        values, codes = (list(calls) for calls in zip(*layers(compiled, shape), strict=True))
        runs = [(seconds(values), seconds(codes)) for _ in range(ROUNDS)]
        plain, coded = (min(times) for times in zip(*runs, strict=True))
        ratio = statistics.median(coded / plain for plain, coded in runs)
        print(shape)
        for name, took, read in (("values", plain, shape.values_bytes), ("codes", coded, shape.codes_bytes)):
            print(f"  {name} {took * 1e6:.0f} us, {read / took / 1e9:.1f} GB/s")
        print(f"  codes take {ratio:.2f} of it, their bytes are {shape.codes_bytes / shape.values_bytes:.2f}")


if __name__ == "__main__":
    main()
