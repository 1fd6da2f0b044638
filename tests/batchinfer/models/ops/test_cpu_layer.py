"""Tests that a decoder layer in one call has the bits of its separate operators."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.models.decoder.block import Block, pack_layer
from batchinfer.models.ops.attention import AttentionInputs, RopeTable
from batchinfer.models.ops.cpu_layer import CompiledLayer
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.torch_ops import TorchLinear, TorchOps
from batchinfer.models.spec.rope_config import RopeConfig
from batchinfer.models.spec.spec import (
    AttentionSpec,
    CacheSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    Rotation,
)
from batchinfer_kernels.cpu.compiled import CompiledOperators
from tests.examples import examples
from tests.kernels.cpu_kit import WAYS, operators

HIDDEN, INNER, KV_HEADS, BLOCK, SHARED = 52, 70, 2, 16, 9


def layer_spec(group, dim, biased, normed, window, inner=INNER, gemma=False):
    """Return a layer's spec.

    Args:
        gemma: norms after each half, norm weights as differences from 1, gelu, capped scores, and interleaved
            rotation.
    """
    norm, heads = NormSpec(HIDDEN, 1e-5, offset=1.0 if gemma else 0.0), (group * KV_HEADS, KV_HEADS, dim)
    qk_norm, cap = replace(norm, width=dim) if normed else None, 4.0 if gemma else None
    rotation, biases = Rotation(RopeConfig(), dim, interleaved=gemma), (biased, biased)
    attention = AttentionSpec(*heads, dim**-0.5, rotation, window, cap, False, qk_norm, qk_norm, *biases)
    fed = FeedForwardSpec(inner, "gelu_tanh" if gemma else "silu", biased)
    after = (norm, norm) if gemma else ()
    return LayerSpec(HIDDEN, norm, attention, norm, fed, *after)


def spec_of(kind, group, dim, biased, normed, window):
    """Return the spec of a layer: Llama's, Gemma's, Llama's with LayerNorm and no gate, or BERT's with norms
    after sums."""
    spec = layer_spec(
        group, dim, biased, normed and kind in ("llama", "gemma"), window, gemma=kind == "gemma"
    )
    if kind in ("llama", "gemma"):
        return spec
    norm, fed = NormSpec(HIDDEN, 1e-5, "layer", biased), FeedForwardSpec(INNER, "gelu", biased, gated=False)
    if kind == "centred":
        return replace(spec, input_norm=norm, post_norm=norm, feed_forward=fed)
    after = {"attention_norm": norm, "feed_forward_norm": norm}
    return LayerSpec(HIDDEN, None, spec.attention, None, fed, **after, norms_sums=True)


def random_weights(spec, dtype):
    """Return random weights that neither shrink nor grow values."""
    found = {name: torch.rand(norm.width).to(dtype) + 0.5 for name, norm in spec.norms.items()}
    found |= {
        f"{name}.bias": torch.randn(norm.width).to(dtype) for name, norm in spec.norms.items() if norm.biased
    }
    for linear in spec.linears:
        found[linear.name] = (torch.randn(linear.outputs, linear.inputs) * linear.inputs**-0.5).to(dtype)
        if linear.biased:
            found[linear.name + ".bias"] = torch.randn(linear.outputs).to(dtype)
    return found


def layer_parts(ops, spec, dtype):
    angles = torch.rand(2048, spec.attention.head_dim // 2) * 6
    rope = RopeTable(angles.cos(), angles.sin(), spec.attention.rotation.interleaved)
    return pack_layer(ops, spec, random_weights(spec, dtype), rope)


def with_linears(parts, **changed):
    return replace(parts, linears={**parts.linears, **changed})


def with_norms(parts, **changed):
    return replace(parts, norms={**parts.norms, **changed})


def step_inputs(lengths):
    """Return sequences of (queries, tokens before them); single queries share their first `SHARED` blocks."""
    queries, contexts = [n for n, _ in lengths], [n + before for n, before in lengths]
    blocks = [-(-context // BLOCK) for context in contexts]
    fresh = iter(range(SHARED, SHARED + sum(blocks)))
    tables = np.zeros((len(lengths), max(blocks)), np.int32)
    for row, (n, count) in enumerate(zip(queries, blocks, strict=True)):
        shared = min(SHARED, count - 1) if n == 1 else 0
        tables[row, :count] = [*range(shared), *(next(fresh) for _ in range(count - shared))]
    row_of = np.repeat(np.arange(len(lengths)), queries)
    positions = np.concatenate([np.arange(c - n, c) for n, c in zip(queries, contexts, strict=True)])
    slots = tables[row_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    arrays = (torch.from_numpy(a) for a in (positions, slots, tables))
    return AttentionInputs(*arrays, queries, contexts), SHARED + sum(blocks)


def run(layers, ops, inputs, blocks, spec, x):
    """Run all layers of a step on caches with equal values."""
    generator = torch.Generator().manual_seed(5)
    plan = ops.plan_attention(inputs, BLOCK, frozenset({spec.attention.window}))
    residual, caches = None, []
    for layer in layers:
        cache = ops.allocate_cache(spec.attention.cache, blocks, BLOCK, x.dtype, "cpu")
        for tensor in (cache.k, cache.v):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        x, residual = layer(x, residual, inputs, cache, plan)
        caches += [cache.k, cache.v]
    return x.clone(), None if residual is None else residual.clone(), caches


@given(
    seed=st.integers(0, 2**16),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    quantization=st.sampled_from(["none", "int8", "int4"]),
    group=st.sampled_from([1, 3]),
    dim=st.sampled_from([20, 64]),
    biased=st.booleans(),
    normed=st.booleans(),
    window=st.sampled_from([None, 40]),
    kind=st.sampled_from(["llama", "gemma", "centred", "bert"]),
    lengths=st.lists(
        st.one_of(
            st.tuples(st.just(1), st.integers(SHARED * BLOCK, 300)),
            st.tuples(st.integers(1, 30), st.integers(0, 100)),
        ),
        min_size=1,
        max_size=8,
    ),
    threads=st.integers(1, 2),
    copied=st.integers(0, BLOCK),
    tiles=st.sampled_from(WAYS),
)
@settings(max_examples=examples(20, 60), deadline=None)
def test_equals_the_operators_one_by_one(
    seed, dtype, quantization, group, dim, biased, normed, window, kind, lengths, threads, copied, tiles
):
    torch.manual_seed(seed)
    ops = CpuOps(operators(tiles), group)
    spec = spec_of(kind, group, dim, biased, normed, window)
    if quantization != "none":
        spec = spec.quantized(quantization)
    parts = [layer_parts(ops, spec, dtype) for _ in range(3)]
    inputs, blocks = step_inputs(lengths)
    if copied:  # copies of the stored tokens, to an unused block
        inputs = replace(inputs, parts=torch.tensor([[int(inputs.slots[0]) // BLOCK, blocks, 0, copied]]))
        blocks += 1
    x = torch.randn(len(inputs.positions), HIDDEN).to(dtype)
    kept, before = x.clone(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        fused = [ops.fuse(spec, p) for p in parts]
        assert all(isinstance(layer, CompiledLayer) for layer in fused)
        got = run(fused, ops, inputs, blocks, spec, x)
        assert torch.equal(x, kept)
        wanted = run([Block(ops, spec, p) for p in parts], ops, inputs, blocks, spec, x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(got[0], wanted[0])
    assert (got[1] is None) == (wanted[1] is None) == (kind == "bert")
    assert got[1] is None or torch.equal(got[1], wanted[1])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[2], wanted[2], strict=True))


@pytest.fixture
def case():
    torch.manual_seed(1)
    ops = CpuOps(CompiledOperators(), 2)
    spec = layer_spec(2, 20, False, False, None)
    parts = layer_parts(ops, spec, torch.float32)
    inputs, blocks = step_inputs([(3, 4), (1, 200)])
    cache = ops.allocate_cache(spec.attention.cache, blocks, BLOCK, torch.float32, "cpu")
    return ops, spec, parts, inputs, cache, ops.plan_attention(inputs, BLOCK, frozenset({None}))


def test_takes_tensors_that_no_layer_made(case):
    ops, spec, parts, inputs, cache, plan = case
    x, residual = torch.randn(4, 2 * HIDDEN)[:, ::2], torch.randn(4, HIDDEN)
    kept = residual.clone()
    got = ops.fuse(spec, parts)(x, residual, inputs, cache, plan)
    wanted = Block(ops, spec, parts)(x.contiguous(), residual, inputs, cache, plan)
    assert torch.equal(got[0], wanted[0])
    assert torch.equal(got[1], wanted[1])
    assert torch.equal(residual, kept)


def test_no_number_reaches_the_output(case):
    ops, spec, parts, inputs, cache, plan = case
    x = torch.randn(4, HIDDEN)
    x[3, 5] = float("nan")
    got, _ = ops.fuse(spec, parts)(x, None, inputs, cache, plan)
    assert got[3].isnan().all()
    assert got[:3].isfinite().all()


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_layers_of_a_step_share_a_room(case, kind):
    """No layer copies the buffer of the layer before."""
    ops, _, _, inputs, cache, plan = case
    spec = spec_of(kind, 2, 20, True, False, None)
    x, residual, rooms = torch.randn(4, HIDDEN), None, []
    for _ in range(3):
        x, residual = ops.fuse(spec, layer_parts(ops, spec, torch.float32))(x, residual, inputs, cache, plan)
        rooms.append(plan.room)
    assert rooms[0] is rooms[1] is rooms[2]


def test_a_layer_with_another_linear_is_run_one_by_one(case):
    ops, spec, parts, *_ = case
    other = TorchLinear(torch.randn(HIDDEN, INNER), None)
    assert ops.fuse(spec, with_linears(parts, down=other)) is None


def test_layers_that_norm_otherwise_are_run_one_by_one(case):
    ops, spec, parts, *_ = case
    norm = spec.input_norm
    assert ops.fuse(replace(spec, post_norm=replace(norm, kind="layer")), parts) is None
    assert ops.fuse(replace(spec, post_norm=replace(norm, eps=1e-6)), parts) is None
    assert ops.fuse(spec, replace(parts, distances=torch.zeros(4, 9))) is None
    centred = replace(spec, input_norm=replace(norm, kind="layer"), post_norm=replace(norm, kind="layer"))
    heads = replace(norm, width=20, kind="layer")
    assert ops.fuse(centred, parts) is not None
    attention = replace(spec.attention, q_norm=heads, k_norm=heads)
    assert ops.fuse(replace(centred, attention=attention), parts) is None


def test_wrong_operands_are_refused(case):
    ops, spec, parts, *_ = case
    with pytest.raises(ValueError, match=r"down is \(52, 52\), expected \(52, 70\)"):
        ops.fuse(spec, with_linears(parts, down=ops.pack_linear(torch.randn(HIDDEN, HIDDEN))))
    with pytest.raises(ValueError, match=r"q_norm is \(8,\) torch.float32, expected \(20,\)"):
        ops.fuse(
            layer_spec(2, 20, False, True, None),
            with_norms(parts, q_norm=torch.ones(8), k_norm=torch.ones(8)),
        )
    with pytest.raises(ValueError, match=r"input_norm is .*, expected \(52,\) torch.float32"):
        ops.fuse(spec, with_norms(parts, input_norm=torch.ones(HIDDEN - 1)))
    with pytest.raises(ValueError, match=r"post_norm is .*bfloat16, expected"):
        ops.fuse(spec, with_norms(parts, post_norm=torch.ones(HIDDEN).bfloat16()))
    with pytest.raises(ValueError, match=r"o is torch.bfloat16, the norms are torch.float32"):
        ops.fuse(spec, with_linears(parts, o=ops.pack_linear(torch.randn(HIDDEN, 80).bfloat16())))


def test_a_step_that_does_not_fit_is_refused(case):
    ops, spec, parts, inputs, cache, plan = case
    layer, x = ops.fuse(spec, parts), torch.randn(4, HIDDEN)
    with pytest.raises(ValueError, match="the cache's blocks are"):
        layer(x, None, inputs, ops.allocate_cache(CacheSpec(1, 20), 4, BLOCK, torch.float32, "cpu"), plan)
    with pytest.raises(ValueError, match=r"blocks are .*bfloat16, expected"):
        layer(
            x, None, inputs, ops.allocate_cache(spec.attention.cache, 4, BLOCK, torch.bfloat16, "cpu"), plan
        )
    with pytest.raises(ValueError, match=r"positions is \(4,\) .* expected \(5,\)"):
        layer(torch.randn(5, HIDDEN), None, inputs, cache, plan)
    with pytest.raises(ValueError, match=r"x is .*bfloat16, expected \(T, 52\) torch.float32"):
        layer(x.bfloat16(), None, inputs, cache, plan)
    with pytest.raises(ValueError, match=r"slots is .*int32, expected \(4,\) torch.int64"):
        layer(x, None, replace(inputs, slots=inputs.slots.int()), cache, plan)
    with pytest.raises(ValueError, match="is not contiguous"):
        layer(x, None, replace(inputs, slots=torch.arange(8)[::2]), cache, plan)
    with pytest.raises(TypeError, match="was not made by the CPU's operators"):
        layer(x, None, inputs, cache, TorchOps().plan_attention(inputs, BLOCK, frozenset({None})))


def test_layers_of_several_sizes_follow_one_another(case):
    """Each layer gets a buffer of its size."""
    ops, spec, parts, inputs, cache, plan = case
    broad = layer_spec(2, 20, False, False, None, 3 * INNER)
    wide = layer_parts(ops, broad, torch.float32)
    outcomes = []
    for made in (ops.fuse, lambda s, p: Block(ops, s, p)):
        x, residual = torch.ones(4, HIDDEN), None
        for layer in (made(spec, parts), made(broad, wide), made(spec, parts)):
            x, residual = layer(x, residual, inputs, cache, plan)
        outcomes.append((x.clone(), residual.clone()))
    assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True))
