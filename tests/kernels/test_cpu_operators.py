"""Compiled CPU operators equal their references: odd shapes, both dtypes, poisoned caches, any block table."""

from __future__ import annotations

import ctypes
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer_kernels.cpu import build
from batchinfer_kernels.cpu.attention_plan import MAX_ROWS
from batchinfer_kernels.cpu.compiled import MAX_HEAD_DIM, CompiledOperators
from batchinfer_kernels.cpu.compilers import NoCompiler
from batchinfer_kernels.cpu.structures import (
    AdaptedStructure,
    Attention,
    ExpertsStructure,
    Heads,
    Latent,
    Layer,
    LayerStep,
    LowRankStructure,
    PartsStructure,
    PlanStructure,
    Weight,
)
from batchinfer_kernels.gated_activation import activation_reference, gated_activation_reference
from batchinfer_kernels.mask import mask_reference, mask_words
from batchinfer_kernels.rms_norm import rms_norm_reference
from batchinfer_kernels.rope_store import rope_store_reference
from tests.kernels.cpu_cache import laid_out, plain
from tests.kernels.cpu_kit import DTYPES, TOLERANCE
from tests.kernels.refused import assert_refused


@pytest.fixture(scope="session")
def compiled() -> CompiledOperators:
    return CompiledOperators()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(0, 8), (1, 1), (3, 63), (64, 100), (5, 576)])
def test_rms_norm(compiled, dtype, rows, hidden):
    torch.manual_seed(rows)
    x, residual, weight = (torch.randn(*s).to(dtype) for s in ((rows, hidden), (rows, hidden), (hidden,)))
    for rules in ((None,), (residual,), (None, 1.0), (residual, 1.0)):
        got, wanted = compiled.rms_norm(x, weight, 1e-5, *rules), rms_norm_reference(x, weight, 1e-5, *rules)
        torch.testing.assert_close(got[0], wanted[0], **TOLERANCE[dtype])
        torch.testing.assert_close(got[1], wanted[1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 63), (64, 100), (2, 3, 37), (5, 577)])
def test_layer_norm(compiled, dtype, shape):
    """Rows are far from 0: their mean takes up the significant bits."""
    torch.manual_seed(len(shape))
    x, residual = ((torch.randn(shape) * 3 + 5).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1]).to(dtype) for _ in range(2))
    for rules in ((bias, 1e-5), (None, 1e-5, residual), (bias, 1e-3, residual)):
        got = compiled.layer_norm(x, weight, *rules)
        total = x.double() if len(rules) == 2 else (x + residual).double()
        wanted = F.layer_norm(total, total.shape[-1:], weight.double(), None, rules[1])
        wanted = wanted if rules[0] is None else wanted + rules[0].double()
        torch.testing.assert_close(got[0], wanted.to(dtype), **TOLERANCE[dtype])
        assert torch.equal(got[1].double(), total)
    bent = x.clone()
    bent.view(-1)[:1] = float("nan")
    normed = compiled.layer_norm(bent, weight, bias, 1e-5)[0]
    assert normed.isnan().sum() == (shape[-1] if x.numel() else 0)
    with pytest.raises(ValueError, match=r"bias is \(1,\) of torch.float64"):
        compiled.layer_norm(x, weight, torch.ones(1).double(), 1e-5)


def test_activations_in_bfloat16_are_rounded_once(compiled):
    """The error of their polynomials is small compared with rounding, also in the tails."""
    x = torch.cat((torch.linspace(-8.9, 12, 50_000), torch.tensor([300.0, 3e38, 1e-30, -1e-30]))).bfloat16()
    exact = x.double()
    for kind, wanted in (
        ("silu", F.silu(exact)),
        ("gelu", F.gelu(exact, approximate="tanh")),
        ("exact_gelu", exact * torch.special.erfc(-exact / 2**0.5) / 2),
    ):
        got = compiled.activate(x.view(1, -1), kind)[0].double()
        apart = (got - wanted).abs() / wanted.abs()
        assert apart[wanted.abs() > 1e-9].max() < 2**-8 * 1.05, kind
        assert (got - wanted).abs()[wanted.abs() <= 1e-9].max() < 1e-10, kind


ACTIVATIONS = [("silu", "gated"), ("gelu_tanh", "gelu_gated"), ("gelu", "exact_gelu_gated")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "kind"),
    [*ACTIVATIONS, ("clamped_swiglu", "clamped_gated")],
)
def test_gate(compiled, dtype, activation, kind):
    torch.manual_seed(0)
    gate_up = (torch.randn(7, 2 * 33) * 20).to(dtype)
    gate_up[0, :4] = torch.tensor([0.0, -200.0, 200.0, -0.0])
    wanted = gated_activation_reference(gate_up, activation)
    torch.testing.assert_close(compiled.gate(gate_up, kind), wanted, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "kind"), ACTIVATIONS)
def test_an_activation_does_not_depend_on_the_position(compiled, dtype, activation, kind):
    """Torch uses other instructions for the last few values of a tensor."""
    torch.manual_seed(1)
    x = (torch.randn(5, 37) * 4).to(dtype)
    x[0, :5] = torch.tensor([0.0, -300.0, 300.0, -0.0, 1e-5])
    got = compiled.activate(x, kind)
    torch.testing.assert_close(got, activation_reference(x, activation), **TOLERANCE[dtype])
    for row in range(len(x)):
        for start in range(0, 37, 5):
            part = x[row : row + 1, start:].contiguous()
            assert torch.equal(compiled.activate(part, kind), got[row : row + 1, start:])
    x[2, 3] = float("nan")
    assert compiled.activate(x, kind).isnan().sum() == 1


def test_capped_logits(compiled):
    torch.manual_seed(1)
    logits = torch.randn(3, 101) * 40
    logits[1, 7], logits[1, 9] = float("inf"), float("-inf")
    wanted, got = 30 * (logits / 30).tanh(), logits.clone()
    compiled.cap_logits(got, 30.0)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    alone = logits[2:, 50:].contiguous()
    compiled.cap_logits(alone, 30.0)
    assert torch.equal(alone, got[2:, 50:])
    assert_refused("not a matrix of float32", compiled.cap_logits, logits.bfloat16(), 30.0)


@pytest.mark.parametrize("vocab", [5, 64, 2101])
def test_masked_logits(compiled, vocab):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(4, vocab, generator=generator)
    bits = torch.randint(-(2**31), 2**31, (3, mask_words(vocab)), generator=generator).int()
    bits[0, 0], bits[1, -1] = -1, 0
    rows, wanted = torch.tensor([3, 0, 2], dtype=torch.int32), logits.clone()
    mask_reference(wanted, rows, bits)
    compiled.mask(logits, rows, bits)
    assert torch.equal(logits, wanted)
    compiled.mask(logits, rows[:0], bits[:0])
    assert torch.equal(logits, wanted)
    for wrong in ((logits, rows + 1, bits), (logits.bfloat16(), rows, bits), (logits, rows, bits[:2])):
        assert_refused(r"rows|float32|bits", compiled.mask, *wrong)


@pytest.mark.parametrize("vocab", [5, 64, 2101])
def test_masked_argmax(compiled, vocab):
    """Equals mask followed by argmax: ties, no allowed token, infinities, NaN."""
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(50):
        logits = torch.randint(-9, 9, (9, vocab), generator=generator).float()
        bits = torch.randint(-(2**31), 2**31, (9, mask_words(vocab)), generator=generator).int()
        bits[0], bits[1], bits[2, 1:] = 0, -1, 0
        places = torch.randint(0, vocab, (5,), generator=generator)
        for row, value in enumerate((float("nan"), float("inf"), float("-inf"))):
            logits[3 + row, places[row]] = value
        logits[6] = float("-inf")
        bits[7] = -1
        logits[7, places[4]] = 100.0
        bits[7, places[4] // 32] &= ~(1 << (int(places[4]) % 32)) if places[4] % 32 != 31 else 0x7FFFFFFF
        before = logits.clone()
        tokens, barred = compiled.masked_argmax(logits, bits)
        assert torch.equal(logits.nan_to_num(123.0), before.nan_to_num(123.0)), "no logit is changed"
        wanted, wanted_barred = TorchOps.masked_argmax(MaskOps(), before, bits)
        assert tokens.tolist() == wanted.tolist()
        plain = [row for row in range(9) if row not in (3, 6)]  # the maximum of these rows is not defined
        assert barred[plain].tolist() == wanted_barred[plain].tolist()
        assert barred[7]
        assert not barred[1]
        assert tokens[0] == tokens[6] == -1
    assert_refused("bits", compiled.masked_argmax, logits, bits[:, :-1])


class MaskOps:
    """Only the mask of the torch operators."""

    def mask(self, logits, rows, bits):
        mask_reference(logits, rows, bits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 20, 64, 128, 256])
@pytest.mark.parametrize("norm", [None, 0.0, 1.0])
@pytest.mark.parametrize("part", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_store(compiled, dtype, dim, norm, part, interleaved):
    """`norm`: the offset of the heads' norms, or None without norms. 1/`part` of a head is rotated."""
    torch.manual_seed(dim)
    tokens, heads, kv_heads, block_size = 9, 6, 2, 4
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    angles = torch.rand(50, max(1, dim // 2 // part)) * 6
    positions = torch.randint(0, 50, (tokens,))
    slots = torch.randperm(5 * block_size)[:tokens]
    norms = [torch.randn(dim).to(dtype) for _ in range(2)] if norm is not None else [None, None]
    caches = [torch.full((5, kv_heads, block_size, dim), 7.0).to(dtype) for _ in range(2)]
    ours = laid_out(compiled, *caches)
    cos, sin = angles.cos(), angles.sin()
    how = {"offset": norm or 0.0, "interleaved": interleaved}
    got = compiled.rope_store(q, k, v, cos, sin, positions, *ours, block_size, slots, *norms, **how)
    wanted = rope_store_reference(q, k, v, cos[positions], sin[positions], *caches, slots, *norms, **how)
    torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])
    for stored, theirs in zip(plain(*ours, block_size, dim), caches, strict=True):
        torch.testing.assert_close(stored, theirs, **TOLERANCE[dtype])
    assert torch.equal(compiled.rope(q, cos, sin, positions, norms[0], **how), got), (
        "q has the same bits without k and v"
    )
    assert torch.equal(compiled.rope(q.contiguous(), cos, sin, positions, norms[0], **how), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [20, 64, 80, 256])
@pytest.mark.parametrize(("block_size", "first"), [(16, 0), (16, 13), (21, 5), (48, 31), (4, 1)])
def test_tokens_at_consecutive_places_are_stored_as_they_are_one_by_one(
    compiled, dtype, dim, block_size, first
):
    torch.manual_seed(dim + first)
    tokens, heads, kv_heads = 37, 3, 2
    fused = torch.randn(tokens, heads + 2 * kv_heads, dim).to(dtype)
    slots, positions = torch.arange(first, first + tokens), torch.arange(tokens)
    angles = torch.rand(tokens, dim // 2) * 6

    def stored(steps: list[int]) -> list[Tensor]:
        """Return q and the caches after steps of these numbers of tokens."""
        shape = (-(-(first + tokens) // block_size), *compiled.cache_shape(kv_heads, block_size, dim))
        caches, rotated = [torch.full(shape, 7.0).to(dtype) for _ in range(2)], []
        for at in (slice(end - n, end) for n, end in zip(steps, accumulate(steps), strict=True)):
            q, k, v = fused[at].split((heads, kv_heads, kv_heads), 1)
            places = (*caches, block_size, slots[at])
            rotated.append(compiled.rope_store(q, k, v, angles.cos(), angles.sin(), positions[at], *places))
        return [torch.cat(rotated), *caches]

    for one_by_one, together in zip(stored([1] * tokens), stored([3, 20, 14]), strict=True):
        assert torch.equal(one_by_one, together)


def test_rotating_an_unsupported_size_is_refused(compiled):
    cos, positions = torch.ones(4, 3), torch.zeros(2).long()
    for q in (
        torch.zeros(2, 1, 4),
        torch.zeros(3, 1, 8),
        torch.zeros(2, 8, 3).transpose(1, 2),
        torch.zeros(2, 1, 300),
    ):
        assert_refused("", compiled.rope, q, cos, cos, positions)


def test_structures_are_those_of_the_library():
    found = (ctypes.c_int64 * 13)()
    build.load_library().sizes(found)
    steps = (Weight, Heads, PlanStructure, Attention, Layer, LayerStep)
    structures = (*steps, ExpertsStructure, Latent, PartsStructure, LowRankStructure, AdaptedStructure)
    ours = [ctypes.sizeof(structure) for structure in structures]
    most = 2 * MAX_ROWS if CompiledOperators().has_tiles else MAX_ROWS
    assert list(found) == [*ours, MAX_HEAD_DIM, most]


def test_nan_reaches_the_output(compiled):
    """The compiler's flags must not assume that there is no NaN."""
    x = torch.ones(4, 8)
    x[1, 3] = float("nan")
    assert compiled.rms_norm(x, torch.ones(8), 1e-5)[0][1].isnan().all()
    assert compiled.gate(x, "gated").isnan().any()


def test_what_does_not_fit_is_refused(compiled):
    x = torch.randn(4, 8)
    assert_refused("not contiguous", compiled.rms_norm, x.T, torch.ones(4), 1e-5)
    assert_refused("float16 is not supported", compiled.rms_norm, x.half(), torch.ones(8).half(), 1e-5)


def test_without_a_compiler_the_error_names_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    with pytest.raises(NoCompiler, match="cannot be started"):
        build.load_library(tmp_path)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoCompiler, match="no C compiler"):
        build.load_library(tmp_path)
