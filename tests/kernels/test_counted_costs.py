"""Tests that the cost of each linear, pointwise and sampling operator equals its reference's FLOPs and its
operands' bytes."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from batchinfer_kernels import cost
from batchinfer_kernels.block_fp8_matmul import block_fp8_matmul_reference
from batchinfer_kernels.experts import choose_experts, combine_reference, group_by_expert
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference, quantize_rows_fp8
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.grouped_matmul import grouped_matmul_reference
from batchinfer_kernels.latent_attention import decompressed_attention_reference
from batchinfer_kernels.layer_norm import layer_norm_reference
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from batchinfer_kernels.mask import mask_reference
from batchinfer_kernels.matmul import matmul_reference
from batchinfer_kernels.merge_state import merge_state_reference
from batchinfer_kernels.mxfp4 import grouped_mxfp4_matmul_reference, mxfp4_values
from batchinfer_kernels.paged_attention import CODES, gather_cached
from batchinfer_kernels.penalties import Penalties, penalise_reference
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.quantized_matmul import (
    int4_values,
    int4_weight_matmul_reference,
)
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_reference, rope_store_reference
from batchinfer_kernels.routing import Routing
from batchinfer_kernels.sample import RowSampling, sample_reference
from tests.kernels.counting import bytes_of, counted
from tests.kernels.cpu_steps import Step, poisoned_step
from tests.kernels.rounded_weights import quantize_blocks_fp8, quantize_int4


def assert_counted(found: cost.Cost, reference: Any, *arguments: Any, moved: Any, **options: Any) -> None:
    """Compare a cost with operations of the reference and the bytes of its results and of `moved`, the operands."""
    assert found.flops == counted(reference, *arguments, **options)
    made = reference(*arguments, **options)
    assert found.bytes == bytes_of(*moved, *(made if isinstance(made, tuple) else (made,)))


def operands(weight: Any) -> list[Tensor]:
    """Return the tensors of a weight: itself, values with scales, or its fields."""
    if isinstance(weight, Tensor):
        return [weight]
    parts = weight if isinstance(weight, tuple) else (getattr(weight, n, None) for n in OPERANDS)
    return [part for part in parts if part is not None]


OPERANDS = ("packed", "codes", "scales", "zeros")
# Quantiser of the weight, reference, declared cost, and options of that cost
LINEAR: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "plain": (lambda weight: weight, matmul_reference, cost.linear_cost, {"weight_itemsize": 2}),
    "int8": (quantize_weight, quantized_linear_reference, cost.quantized_linear_cost, {}),
    "fp8": (quantize_rows_fp8, fp8_matmul_reference, cost.fp8_linear_cost, {}),
    "block_fp8": (quantize_blocks_fp8, block_fp8_matmul_reference, cost.block_fp8_linear_cost, {}),
    **{
        f"int4_{group}{'_zeros' * zeros}": (
            partial(quantize_int4, group=group, symmetric=not zeros),
            int4_weight_matmul_reference,
            cost.weight_only_linear_cost,
            {"group": group, "zeros": zeros},
        )
        for group in (32, 128)
        for zeros in (False, True)
    },
}


@pytest.mark.parametrize("sizes", [(1, 128, 4), (5, 200, 33), (5, 300, 200)])
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, sizes):
    quantize, reference, declared, options = LINEAR[name]
    tokens, inputs, outputs = sizes
    x, weight = torch.randn(tokens, inputs).bfloat16(), quantize(torch.randn(outputs, inputs).bfloat16())
    found, given = declared(*sizes, 2, **options), weight if isinstance(weight, tuple) else (weight,)
    assert_counted(found, reference, x, *given, moved=[x, *operands(weight)])
    assert found.coded_ops == (2 * math.prod(sizes) if name in ("int8", "block_fp8") else 0)


@pytest.mark.parametrize("zeros", [False, True])
def test_widening(zeros):
    weight = quantize_int4(torch.randn(33, 200).bfloat16(), 32, symmetric=not zeros)
    found = cost.widening_cost(200, 33, 2, group=32, zeros=zeros)
    assert_counted(found, int4_values, weight, moved=operands(weight))


STARTS = torch.tensor([0, 2, 2, 6])  # the second expert has no row


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 4), (200, 33)])
def test_grouped_linear(inputs, outputs):
    x, weight = torch.randn(6, inputs).bfloat16(), torch.randn(3, outputs, inputs).bfloat16()
    found = cost.grouped_linear_cost(6, 2, inputs, outputs, 2, 2)
    assert_counted(found, grouped_matmul_reference, x, weight, STARTS, moved=[x, weight[:2]])
    thrice = cost.grouped_linear_cost(6, 2, inputs, outputs, 2, 2, tokens=2)
    y = grouped_matmul_reference(x, weight, STARTS)
    assert (thrice.flops, thrice.bytes) == (found.flops, bytes_of(x[:2], weight[:2], y))


def test_grouped_linear_of_codes():
    x, weight = torch.randn(6, 40).bfloat16(), torch.randn(3 * 12, 40).bfloat16()
    codes, scales = (part.view(3, 12, *part.shape[1:]) for part in quantize_weight(weight))
    found, moved = cost.quantized_grouped_linear_cost(6, 2, 40, 12, 2), [x, codes[:2], scales[:2]]
    assert found.coded_ops == 2 * 6 * 40 * 12
    assert_counted(found, grouped_matmul_reference, x, codes, STARTS, scales=scales, moved=moved)


def test_grouped_linear_of_int4():
    """Each expert with rows costs a linear layer, read once."""
    found = cost.int4_grouped_linear_cost(6, 2, 70, 12, 2, 32)
    one = cost.int4_linear_cost(6, 70, 12, 2, 32)
    weights = cost.int4_linear_cost(0, 70, 12, 2, 32).bytes
    assert (found.flops, found.coded_ops, found.bytes) == (one.flops, one.coded_ops, one.bytes + weights)
    wide = cost.int4_grouped_linear_cost(6, 2, 70, 12, 2, 32, coded=False)
    assert (wide.flops, wide.coded_ops, wide.bytes) == (2 * 6 * 70 * 12, 0, found.bytes)


def test_grouped_linear_of_mxfp4():
    x, exponents = torch.randn(6, 64).bfloat16(), torch.full((3, 12, 2), 120, dtype=torch.uint8)
    codes = torch.randint(0, 256, (3, 12, 32), dtype=torch.uint8)
    found = cost.mxfp4_grouped_linear_cost(6, 2, 64, 12, 2)
    values = mxfp4_values(codes, exponents).bfloat16()
    assert found.flops == counted(grouped_matmul_reference, x, values, STARTS)
    y = grouped_mxfp4_matmul_reference(x, codes, exponents, STARTS)
    assert found.bytes == bytes_of(x, codes[:2], exponents[:2], y)


def test_grouped_linear_of_codes_with_scales_of_blocks():
    x, coded = torch.randn(6, 140).bfloat16(), quantize_blocks_fp8(torch.randn(3 * 32, 140), 16)
    codes, scales = coded.codes.view(3, 32, 140), coded.scales.view(3, 2, 2)
    options = {"scales": scales, "lines": coded.lines[:32], "moved": [x, codes[:2], scales[:2]]}
    found = cost.block_fp8_grouped_linear_cost(6, 2, 140, 32, 2, block=(16, 128))
    assert found.coded_ops == 2 * 6 * 140 * 32
    assert_counted(found, grouped_matmul_reference, x, codes, STARTS, **options)


def spelled_layer_norm(x, weight, bias, eps, residual):
    """Compute in single operations what torch does in one call."""
    total = x if residual is None else x + residual
    centred = total - total.mean(-1, keepdim=True)
    scaled = centred * (centred.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight
    return scaled if bias is None else scaled + bias


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (5, 33)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_layer_norm(tokens, hidden, biased, added):
    x, residual = torch.randn(2, tokens, hidden)
    weight, bias = torch.randn(2, hidden)
    arguments = (x, weight, bias if biased else None, 1e-5, residual if added else None)
    got, total = layer_norm_reference(*arguments)
    torch.testing.assert_close(got, spelled_layer_norm(*arguments), atol=1e-5, rtol=1e-5)
    found = cost.layer_norm_cost(tokens, hidden, x.element_size(), added, biased)
    moved = (x, weight, got, *([bias] if biased else []), *([residual, total] if added else []))
    assert found.bytes == bytes_of(*moved)
    assert found.flops == counted(spelled_layer_norm, *arguments)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 8), (5, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(tokens, hidden, dtype):
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.ones(hidden, dtype=dtype)
    for residual, moved in ((None, [x, weight, x]), (x, [x, x, weight, x, x])):
        found = cost.rms_norm_cost(tokens, hidden, x.element_size(), residual=residual is not None)
        assert found.flops == counted(rms_norm_reference, x, weight, 1e-5, residual)
        assert found.bytes == bytes_of(*moved)


@pytest.mark.parametrize("codes", [None, "int8", "fp8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("pairs", [4, 8])
def test_rope_store(codes, normed, pairs):
    tokens, heads, kv_heads, dim, dtype = 3, 6, 2, 16, torch.bfloat16
    q, k = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, kv_heads, dim).to(dtype)
    cos, slots = torch.ones(tokens, pairs), torch.arange(tokens)
    caches = [torch.zeros(1, kv_heads, 4, dim).to(CODES[codes] if codes else dtype) for _ in range(2)]
    norms = [torch.ones(dim, dtype=dtype) for _ in range(2)] if normed else []
    scales = [] if codes is None else [torch.zeros(1, kv_heads, 4) for _ in range(2)]
    options = dict(zip(("k_scale", "v_scale"), scales, strict=False))
    flops = counted(rope_store_reference, q, k, k, cos, cos, *caches, slots, *norms, **options)
    found = cost.rope_store_cost(
        tokens,
        heads,
        kv_heads,
        dim,
        2,
        rotary_dim=2 * pairs,
        codes=codes,
        normed=normed,
    )
    assert found.flops == flops
    stored = [cache[0, :, :tokens] for cache in (*caches, *scales)]
    assert found.bytes == bytes_of(q, q, k, k, *stored, cos, cos, slots, *norms)


@pytest.mark.parametrize("normed", [False, True])
def test_rope_of_q_alone(normed):
    q, cos = torch.randn(3, 6, 16).bfloat16(), torch.ones(3, 4)
    norms = [torch.ones(16).bfloat16()] if normed else []
    found = cost.rope_store_cost(3, 6, 0, 16, 2, rotary_dim=8, normed=normed)
    assert_counted(found, rope_reference, q, cos, cos, *norms, moved=[q, cos, cos, *norms])


def test_rope_of_whole_heads():
    whole = cost.rope_store_cost(3, 6, 2, 16, 2)
    assert whole == cost.rope_store_cost(3, 6, 2, 16, 2, rotary_dim=16)


def test_gated_activation():
    gate_up = torch.randn(3, 22)
    found = cost.gated_activation_cost(3, 11, 4)
    assert_counted(found, gated_activation_reference, gate_up, "silu", moved=[gate_up])


def test_scaling_and_capping():
    x, logits = torch.randn(3, 50).bfloat16(), torch.randn(3, 50)
    assert_counted(cost.scale_cost(3, 50, 2), lambda: x * 0.5, moved=[x])
    assert_counted(cost.cap_cost(3, 50), lambda: (logits / 30).tanh() * 30, moved=[logits])


@pytest.mark.parametrize("drawn", [0, 2])
def test_sample(drawn):
    rows, vocab = 5, 40
    logits, none = torch.randn(rows, vocab), torch.zeros(rows, dtype=torch.int32)
    temperature = torch.tensor([1.0] * drawn + [0.0] * (rows - drawn))
    off, all_of = torch.zeros(rows).double(), torch.ones(rows).double()
    sampling = RowSampling(temperature, none, all_of, off, none[:, None].repeat(1, 4), none)
    found = cost.sample_cost(rows, vocab, 4, drawn)
    beside = counted(sample_reference, logits, sampling) - found.flops
    assert 0 <= beside <= 12 * rows, "a few operations a row, on its arguments"
    assert found.bytes == bytes_of(logits, sample_reference(logits))


def test_penalise():
    prompt, answer = [1, 2, 2, 3], [3, 3, 4]
    one, zero = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    tokens = torch.tensor(prompt + answer, dtype=torch.int32)
    lens = (torch.tensor([n], dtype=torch.int32) for n in (len(prompt), len(tokens)))
    penalties = Penalties(zero, tokens, zero.long(), *lens, 2 * one, one, one, zero[:, None][:, :0])
    distinct, said = len({*prompt, *answer}), len({*answer})
    found = cost.penalise_cost(len(tokens), distinct, said, 4)
    logits = torch.from_numpy(np.arange(10, dtype=np.float32))[None]
    assert found.flops == counted(penalise_reference, logits, penalties)
    assert found.bytes == bytes_of(tokens, logits[:, :distinct], logits[:, :distinct])


def test_mask():
    logits, bits = torch.randn(5, 70), torch.tensor([[-1, 0, -1], [-1, -1, -2]], dtype=torch.int32)
    rows = torch.tensor([3, 1], dtype=torch.int32)
    found = cost.mask_cost(2, 70, 33, 4)
    assert found.flops == counted(mask_reference, logits, rows, bits)
    assert int(logits.isinf().sum()) == 33
    assert found.bytes == bytes_of(rows, bits, logits[logits.isinf()])


def test_log_probabilities():
    logits, chosen = torch.randn(3, 50), torch.zeros(3).long()
    found = cost.log_probabilities_cost(3, 50, 4, 4)
    assert_counted(found, log_probabilities_reference, logits, chosen, 4, moved=[logits, chosen])


def test_routing_and_combination():
    tokens, routing = 5, Routing(7, 3)
    logits = torch.randn(tokens, 7)
    choice = choose_experts(logits, routing)
    found = cost.routing_cost(tokens, 7, 3)
    assert found.flops == counted(choose_experts, logits, routing)
    assert found.bytes == bytes_of(logits, choice.experts, choice.weights)
    groups = group_by_expert(choice.experts, 7)
    arguments = (torch.randn(15, 11), groups.order, choice.weights)
    assert_counted(cost.combine_cost(tokens, 3, 11, 4), combine_reference, *arguments, moved=arguments)


def bytes_of_attention(step: Step) -> int:
    """Return the bytes of queries, results, and each sequence's keys and values."""
    caches = (step.k, step.v, *(step.scales or ()))
    tables = zip(step.table, step.contexts, strict=True)
    cached = [gather_cached(cache, table, context) for table, context in tables for cache in caches]
    return bytes_of(step.q, step.reference(), *cached)


@pytest.mark.parametrize("codes", [False, True])
def test_attention_of_single_queries(codes):
    step = poisoned_step(0, 6, 2, 80, 16, [(1, 5), (1, 33), (1, 2)]).to(torch.bfloat16, codes)
    with FlopCounterMode(display=False) as counter:
        step.reference()
    found = cost.attention_cost(3, 40, 40, 6, 2, 80, 2, codes)
    assert (found.flops, found.bytes) == (counter.get_total_flops(), bytes_of_attention(step))


@pytest.mark.parametrize("window", [None, 4])
def test_attention_of_chunks_counts_only_visible_keys(window):
    """Query by query: in longer chunks, the reference also multiplies masked keys."""
    step = poisoned_step(0, 2, 1, 64, 16, [(6, 20), (3, 5)])
    ends = [at + 1 for queries, context in step.chunks for at in range(context - queries, context)]
    seen = [end if window is None else min(end, window) for end in ends]
    with FlopCounterMode(display=False) as counter:
        for keys in seen:
            poisoned_step(0, 2, 1, 64, 16, [(1, keys)]).reference()
    found = cost.attention_cost(9, sum(seen), 25, 2, 1, 64, 4)
    assert (found.flops, found.bytes) == (counter.get_total_flops(), bytes_of_attention(step))


def test_attention_over_latents_has_both_products():
    found = cost.latent_attention_cost(1, 10, 10, heads=4, width=24, rank=16, itemsize=2)
    assert found.flops == 2 * 10 * 4 * (24 + 16)
    assert found.bytes == 2 * (4 * (24 + 16) + 10 * 24)


def test_attention_with_what_is_made_of_latents():
    heads, sizes, keys = 3, cost.LatentSizes(rank=20, plain=6, turned=4, value=5), 9
    q, shared = torch.randn(keys, heads, 10), torch.randn(keys, 4)
    k, v = torch.randn(heads, keys, 6), torch.randn(heads, keys, 5)
    step = q, k, v, shared, [keys], [keys], 0.3
    found = cost.decompressed_attention_cost(keys, keys * keys, keys, heads, sizes, 4)
    with FlopCounterMode(display=False) as counter:
        out = decompressed_attention_reference(*step)
    assert found == cost.Cost(counter.get_total_flops(), bytes_of(q, k, v, shared, out))
    made = cost.linear_cost(1, 20, 6 + 5, 0, 0).flops
    assert (sizes.made, sizes.pair + sizes.saved) == (made, 2 * (20 + 4 + 20))


@given(queries=st.integers(1, 500), earlier=st.integers(0, 5000))
def test_decompressing_latents_is_chosen_if_it_is_cheaper(queries, earlier):
    """With heads as in DeepSeek-V3, also for many sequences at once."""
    sizes = cost.LatentSizes(512, 128, 64, 128)
    pairs = sum(earlier + n + 1 for n in range(queries))
    decompressed = sizes.pair * pairs + sizes.made * (earlier + queries)
    absorbed = (sizes.pair + sizes.saved) * pairs + sizes.made * queries
    assert sizes.is_decompressing_cheaper(queries, queries + earlier) == (decompressed < absorbed)
    lens = np.array([queries, 1, 1000])
    found = sizes.is_decompressing_cheaper(lens, np.array([queries + earlier, 2, 1000]))
    assert found.tolist() == [decompressed < absorbed, False, True]


def test_merged_parts():
    outs, lses = torch.randn(3, 5, 4, 64), torch.randn(3, 5, 4)
    found = cost.merge_state_cost(3, 5, 4, 64, 4)
    assert found.bytes == bytes_of(outs, lses, *merge_state_reference(outs, lses))
    assert found.flops == 2 * outs.numel()
