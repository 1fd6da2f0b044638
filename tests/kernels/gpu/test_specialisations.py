"""Tests that values which change per step do not make Triton compile again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gpu.attention_plan import AttentionShape, SharedPrefix, plan_attention
from batchinfer_kernels.gpu.grouped_matmul import grouped_matmul
from batchinfer_kernels.gpu.latent_attention import latent_attention
from batchinfer_kernels.gpu.paged_attention import paged_attention
from batchinfer_kernels.gpu.penalties import penalise
from batchinfer_kernels.gpu.sort_by_expert import sort_by_expert
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.penalties import Penalties
from tests.kernels.gpu.matmul_cases import way
from tests.kernels.gpu.specialisations import recorded
from tests.kernels.rounded_weights import quantize_blocks_fp8

HEADS, KV_HEADS, DIM, BLOCK = 3, 3, 64, 16
SHAPE = AttentionShape(torch.float32, HEADS, KV_HEADS, DIM)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="launches are recorded in the interpreter")


def attend(query_lens, contexts, shared=()) -> None:
    """Run one step, with block tables for its longest context."""
    cache = torch.zeros(4, KV_HEADS, BLOCK, DIM)
    tables = torch.zeros(len(contexts), -(-max(contexts) // BLOCK), dtype=torch.int32)
    plan = plan_attention(query_lens, contexts, SHAPE, "cpu", shared)
    paged_attention(torch.zeros(sum(query_lens), HEADS, DIM), cache, cache, tables, plan, ScoreRules(0.1))


def kernels(found) -> list[str]:
    return sorted(name for name, *_ in found)


def test_attention_of_steps_of_all_sizes() -> None:
    """Tables of 1, 2, 16 and 17 blocks; one to three shared levels; 1 to 17 rows, split or not."""
    with recorded(runs=False) as found:
        for rows, context in ((1, 10), (2, 30), (16, 250), (17, 270)):
            attend([1] * rows, [context] * rows)
    assert kernels(found) == ["_decode_attention_kernel"]
    with recorded(runs=False) as found:
        for rows, context in ((1, 600), (3, 1100), (16, 2000)):
            attend([1] * rows, [context] + [10] * (rows - 1))
    assert kernels(found) == ["_decode_attention_kernel", "merge_state_kernel"]
    with recorded(runs=False) as found:
        for rows, ends in ((4, (128,)), (5, (128, 256)), (16, (128, 256, 384))):
            attend([1] * rows, [500] * rows, [SharedPrefix(range(rows), end) for end in ends])
    assert kernels(found) == ["_decode_attention_kernel", "_prefix_attention_kernel", "merge_state_kernel"]
    with recorded(runs=False) as found:
        for first, rest in ((5, 1), (17, 2), (40, 16)):
            attend([first] + [1] * rest, [first] + [100 * rest] * rest)
    assert kernels(found) == ["_decode_attention_kernel", "_prefill_attention_kernel"]


def test_latents_of_tables_of_all_widths() -> None:
    shape = AttentionShape(torch.float32, 4, 1, 80, latent=True)
    with recorded(runs=False) as found:
        for width in (1, 2, 16, 17):
            tables = torch.zeros(2, width, dtype=torch.int32)
            plan = plan_attention([1, 3], [width, 3 * width], shape, "cpu")
            latent_attention(torch.zeros(4, 4, 80), torch.zeros(3, 1, BLOCK, 80), tables, plan, 0.1, 64)
    assert kernels(found) == ["_latent_decode_kernel", "_latent_prefill_kernel"]


@pytest.mark.parametrize("name", ["plain", "block_fp8", "int4_64_zeros"])
def test_products_of_any_number_of_rows_with_the_same_tile(name: str) -> None:
    multiply = way(name, torch.zeros(96, 1152))
    with recorded(runs=False) as found:
        for rows in (1, 2, 15, 16):
            multiply(torch.zeros(rows, 1152))
    quantising = ["_quantize_groups_kernel"] if name == "block_fp8" else []
    product = "_coded_matmul_kernel" if name.startswith("int4") else "matmul_kernel"
    assert kernels(found) == [*quantising, product]


def test_experts_of_any_number_of_rows_with_the_same_tile() -> None:
    weight = quantize_blocks_fp8(torch.zeros(3 * 64, 128), 64)
    codes, scales = weight.codes.view(3, 64, 128), weight.scales.view(3, 1, 1)
    with recorded(runs=False) as found:
        for rows in (1, 2, 16, 17):
            starts = torch.tensor([0, rows, rows, rows])
            grouped_matmul(torch.zeros(rows, 128), codes, starts, scales=scales, lines=weight.lines[:64])
    assert kernels(found) == ["_quantize_groups_kernel", "grouped_matmul_kernel"]


def test_penalties_with_any_number_of_bans() -> None:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    with recorded(runs=False) as found:
        for bans in (1, 2, 16):
            starts, banned = torch.zeros(1, dtype=torch.int64), torch.zeros(1, bans, dtype=torch.int32)
            said = (ints(0), ints(1, 2), starts, ints(1), ints(2))
            penalise(torch.zeros(1, 50), Penalties(*said, *[torch.ones(1)] * 3, banned))
    assert kernels(found) == ["_penalise_kernel"]


def test_a_number_that_is_not_declared_variable_is_compiled_again() -> None:
    """Guards this file: rows of 64 values have a stride divisible by 16, rows of 72 do not."""
    plan = plan_attention([1, 1], [3, 4], AttentionShape(torch.float32, 1, 1, 64), "cpu")
    cache, tables = torch.zeros(1, 1, BLOCK, 64), torch.zeros(2, 1, dtype=torch.int32)
    with recorded(runs=False) as found:
        for stride in (64, 72):
            paged_attention(torch.zeros(2, stride)[:, None, :64], cache, cache, tables, plan, ScoreRules(0.1))
    assert kernels(found) == ["_decode_attention_kernel"] * 2


def test_experts_of_any_number_of_tokens() -> None:
    counts = torch.zeros(4, dtype=torch.int32)
    with recorded(runs=False) as found:
        for tokens in (1, 3, 8, 40):
            experts = torch.zeros(tokens, 2, dtype=torch.int64)
            sort_by_expert(Choice(experts, torch.ones(tokens, 2), counts), torch.zeros(4, dtype=torch.int64))
    assert kernels(found) == ["_sort_kernel"]
