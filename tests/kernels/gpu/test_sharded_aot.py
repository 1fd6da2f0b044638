"""Kernels of what a tensor rank has, compiled for a GPU: heads and widths that a whole model hardly has."""

from __future__ import annotations

import pytest
import torch

from batchinfer.models.parallel.place import Portion, RankPlace
from batchinfer.models.parallel.sharded import sharded
from batchinfer.models.spec.spec import AttentionSpec, ModelSpec
from batchinfer_kernels.gpu.rope_store import rope_store
from tests.examples import first_of
from tests.kernels.gpu.aot import compile_launch
from tests.kernels.gpu.attention_cases import decode, paged_case, prefill
from tests.kernels.gpu.test_rope_store import Case
from tests.model_costs import llama_spec

TARGET, DTYPE, DIM, ROWS = "sm_90", "bfloat16", 128, 64
# layers, hidden, intermediate, query and KV heads, size of a head, tokens; and the ranks
PARTS: dict[str, tuple[ModelSpec, int]] = {
    "3 KV heads over 6 ranks": (llama_spec(1, 3072, 8448, 24, 3, DIM, 32_003), 6),
    "9 heads of 3": (llama_spec(1, 2304, 6144, 18, 6, DIM, 50_257), 2),
    "7 heads of 1": (llama_spec(1, 3584, 18_944, 28, 4, DIM, 151_938), 4),
    "5 heads of 5": (llama_spec(1, 1280, 5120, 10, 10, DIM, 128_259), 2),
}


def own(name: str, rank: int) -> ModelSpec:
    """The part of a rank."""
    spec, size = PARTS[name]
    return sharded(spec, RankPlace(Portion(rank, size)))


def heads_of(spec: ModelSpec) -> tuple[int, int]:
    """KV heads, and query heads of each."""
    attention = spec.layers[0].attention
    assert isinstance(attention, AttentionSpec)
    return attention.kv_heads, attention.group


def launch_attention(kv_heads: int, group: int) -> None:
    """Queries and keys are turned and stored; then prompts are read, and rows decoded, in one part each and in more."""
    stored = Case(16, kv_heads * group, kv_heads, DIM, dtype=getattr(torch, DTYPE), block_size=16)
    rope_store(**stored.tensors, **stored.tables, **stored.caches())
    for chunks, work in ((((100, 300),), prefill), (((1, 300),) * 2, decode)):
        paged = paged_case(chunks, kv_heads, group, DIM, dtype=getattr(torch, DTYPE))
        work(paged, lse=None)
    decode(paged, None, 512, planned=[3000] * 2, lse=None)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", first_of(PARTS, 2))
def test_attention_of_a_rank(name: str) -> None:
    kv_heads, group = heads_of(own(name, 1))
    found = compile_launch(f"{__name__}:launch_attention", (kv_heads, group), TARGET)
    assert len(found) >= 4
    for kernel in found:
        kernel.check()


@pytest.mark.parametrize(("name", "way"), first_of(
    ((name, way) for way in ("int8", "fp8", "plain", "int4_64") for name in PARTS), 1
))  # fmt: skip
def test_products_of_a_rank(name: str, way: str) -> None:
    """Of each part of a layer, and of the head: the parts of the tokens, some of which are odd."""
    spec = own(name, 1)
    sizes = {(linear.outputs, linear.inputs) for linear in spec.linears()}
    for rank in (0, 1):
        first, end = own(name, rank).tokens or (0, 0)
        sizes.add((end - first, spec.hidden))
    assert any(outputs % 2 for outputs, _ in sizes)
    for outputs, inputs in sorted(sizes):
        arguments = (way, DTYPE, ROWS, outputs, inputs, way == "plain", None, 1)
        for kernel in compile_launch("tests.kernels.gpu.matmul_cases:launch_way", arguments, TARGET):
            kernel.check(may_wait=way == "int4_64")
