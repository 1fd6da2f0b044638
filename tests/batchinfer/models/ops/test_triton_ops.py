"""Tests which operators a GPU gets, and their parts. Uses the GPU if there is one, otherwise the interpreter."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import triton

from batchinfer.core.errors import Unavailable
from batchinfer.models.ops import choose
from batchinfer.models.ops.attention import AttentionInputs
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.layers import CodedWeight, Linear
from batchinfer.models.ops.torch_ops import TorchOps
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.spec import CacheSpec
from batchinfer_kernels.arithmetic import WeightForm
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.gpu import attention_plan, fp8_matmul, target
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from batchinfer_kernels.paged_attention import ScoreRules
from batchinfer_kernels.quantized_linear import quantize_weight, quantized_linear_reference
from batchinfer_kernels.sample import NO_TOKEN
from batchinfer_kernels.step_tables import StepTables

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
GPU = torch.device("cuda")
FORMS = {
    "none": frozenset[WeightForm](),
    "int8": frozenset({WeightForm("int8")}),
    "fp8": frozenset({WeightForm("fp8")}),
    "stored": frozenset({WeightForm("fp8", "block", stored=True)}),
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
SHAPE = AttentionShape(torch.float32, 4, 2, 16)
INVARIANT = AttentionShape(torch.float32, 4, 2, 16, deterministic=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("quantization", "deterministic", "linear"),
    [
        ("none", False, "library"),
        ("int8", False, "int8"),
        ("fp8", False, "fp8"),
        ("none", True, "triton"),
        ("int8", True, "int8"),
        ("fp8", True, "fp8"),
    ],
)
def test_a_gpu_gets_tritons(dtype, quantization, deterministic, linear):
    ops = choose_ops(GPU, dtype, 4, 128, forms=FORMS[quantization], deterministic=deterministic, kv_heads=8)
    assert isinstance(ops, TritonOps)
    codes = None if quantization == "none" else quantization
    assert (ops.name, ops.linear(codes)) == ("triton", linear)


def test_unsupported_layers_use_torch_operators_with_a_warning(caplog):
    for group, head_dim in ((17, 64), (4, 320)):
        assert type(choose_ops(GPU, torch.bfloat16, group, head_dim)) is TorchOps
    assert caplog.text.count("torch's operators are used") == 2
    with pytest.raises(
        Unavailable, match=r"int8 needs the Triton operators: they do not cover .*17 query heads"
    ):
        choose_ops(GPU, torch.bfloat16, 17, 64, forms=FORMS["int8"])


def test_without_triton(monkeypatch, caplog):
    monkeypatch.setattr(choose.importlib.util, "find_spec", lambda name: None)
    assert type(choose_ops(GPU, torch.bfloat16, 4, 64)) is TorchOps
    assert "triton is not installed" in caplog.text
    with pytest.raises(Unavailable, match="deterministic: true needs the Triton operators: triton is not"):
        choose_ops(GPU, torch.bfloat16, 4, 64, deterministic=True)
    with pytest.raises(Unavailable, match=r"\(pip install triton\), or take model.quantization: none$"):
        choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["stored"])
    both = (
        r"int8 and engine\.deterministic: true need the .*; install it \(pip install triton\), or take it out"
    )
    with pytest.raises(Unavailable, match=both):
        choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["int8"], deterministic=True)


@pytest.mark.parametrize(
    ("architecture", "has"), [("75", "7.5"), ("80", None), ("100", None), ("gfx942", None)]
)
def test_a_gpu_that_is_too_old_gets_torchs_or_is_refused(monkeypatch, caplog, architecture, has):
    monkeypatch.setattr(target, "architecture", lambda: architecture)
    chosen = choose_ops(GPU, torch.bfloat16, 4, 64)
    if has is None:
        assert type(chosen) is TritonOps
        assert type(choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["int8"])) is TritonOps
        return
    assert type(chosen) is TorchOps
    assert f"compute capability {has}" in caplog.text
    with pytest.raises(
        Unavailable, match=r"int8 needs .* has compute capability 7\.5, .*; use a newer GPU"
    ) as refused:
        choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["int8"])
    assert refused.value.exit_code == 69


@pytest.mark.parametrize(("architecture", "why"), [("80", "has 8.0"), ("gfx942", "matrix cores of gfx942")])
def test_fp8_is_refused_on_devices_that_cannot_multiply_it(monkeypatch, architecture, why):
    monkeypatch.setattr(fp8_matmul, "architecture", lambda: architecture)
    with pytest.raises(Unavailable, match=rf"fp8 needs .*{why}.*; use model.quantization: int8") as refused:
        choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["fp8"])
    assert refused.value.exit_code == 69
    with pytest.raises(Unavailable, match=r"a CPU cannot multiply in fp8; use engine\.device: cuda"):
        choose_ops(torch.device("cpu"), torch.bfloat16, 4, 64, forms=FORMS["fp8"])


@pytest.mark.skipif(DEVICE == "cuda", reason="there is a driver")
def test_triton_without_a_driver_is_an_error(monkeypatch, caplog):
    """Without the interpreter, Triton needs the driver."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    wanted = "int8 needs the Triton operators: Triton cannot use this GPU: (.|\\n)*C compiler"
    with pytest.raises(Unavailable, match=wanted):
        choose_ops(GPU, torch.bfloat16, 4, 64, forms=FORMS["int8"])
    assert choose_ops(GPU, torch.bfloat16, 4, 64).name == "torch"
    assert "torch's operators are used" in caplog.text


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes]


@pytest.mark.parametrize("shape", [SHAPE, INVARIANT])
def test_linear_layers(shape):
    x, weight, bias = tensors((5, 48), (32, 48), (32,))
    ops = TritonOps(shape)
    wide = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(ops.pack_linear(weight, bias)(x), wide, atol=1e-4, rtol=1e-4)
    gated = ops.pack_gated(weight, bias, "silu")
    assert gated.out_features == 16
    torch.testing.assert_close(gated(x), gated_activation_reference(wide, "silu"), atol=1e-4, rtol=1e-4)
    check_head(ops, x, weight, (wide - bias).argmax(-1))


def test_int8_layers():
    x, weight, bias = tensors((5, 48), (32, 48), (32,))
    ops, codes = TritonOps(SHAPE), quantize_weight(weight)
    coded = CodedWeight(*codes)
    wanted = quantized_linear_reference(x, *codes, bias)
    torch.testing.assert_close(ops.pack_linear(coded, bias)(x), wanted, atol=1e-5, rtol=1e-5)
    gated = ops.pack_gated(coded, bias, "gelu")(x)
    torch.testing.assert_close(gated, gated_activation_reference(wanted, "gelu"), atol=1e-5, rtol=1e-5)
    check_head(ops, x, weight, quantized_linear_reference(x, *codes, None).argmax(-1), WeightForm("int8"))


def check_head(
    ops: TritonOps, x: torch.Tensor, weight: torch.Tensor, best: torch.Tensor, form: WeightForm | None = None
) -> None:
    head = ops.pack_head(ops.convert_weight(weight.bfloat16().float(), form))
    assert (head.in_features, head.out_features) == (48, 32)
    assert head(x).dtype == torch.float32
    head = ops.pack_head(ops.convert_weight(weight, form))
    assert torch.equal(head(x).argmax(-1), best)
    assert torch.equal(head.argmax(x), best)
    broken = x.clone()
    broken[2] = float("nan")
    assert head.argmax(broken).tolist() == [NO_TOKEN if i == 2 else int(b) for i, b in enumerate(best)]


@pytest.mark.parametrize("form", [None, WeightForm("int8")])
def test_a_row_of_a_deterministic_layer_does_not_depend_on_other_rows(form):
    x, weight = tensors((70, 64), (24, 64))
    ops = TritonOps(INVARIANT)
    weight = ops.convert_weight(weight, form)
    layers: list[Linear] = [
        ops.pack_linear(weight),
        ops.pack_gated(weight, None, "silu"),
        ops.pack_head(weight),
    ]
    for layer in layers:
        assert torch.equal(layer(x)[33:34], layer(x[33:34].clone()))


def test_a_plan_made_for_a_graph_can_be_refilled_for_another_step(monkeypatch):
    """Attention with the refilled plan equals attention with a new plan."""
    monkeypatch.setattr(attention_plan, "LEAST_SHARED_KEYS", 32)
    ops, size, width = TritonOps(SHAPE), 16, 8
    cache = ops.allocate_cache(CacheSpec(2, 16), 48, size, torch.float32, DEVICE)
    (q,) = tensors((6, 4, 16))
    cache.k.copy_(tensors(cache.k.shape)[0])
    cache.v.copy_(tensors(cache.v.shape)[0] * 2)
    tables = np.arange(48, dtype=np.int32).reshape(6, width)
    tables[:4, :4] = tables[0, :4]  # four rows share 64 keys
    placed = torch.from_numpy(tables.copy()).to(DEVICE)

    def inputs(contexts: list[int]) -> AttentionInputs:
        nothing = torch.zeros(6, dtype=torch.int64)
        return AttentionInputs(nothing, nothing, placed, [1] * 6, contexts, StepTables.of(tables))

    first, second = [70, 80, 90, 70, 5, 0], [71, 99, 127, 71, 6, 17]
    plan = ops.plan_captured(inputs(first), size, frozenset([None]), 128)
    later = ops.plan_captured(inputs(second), size, frozenset([None]), 128)
    assert plan.sizes == later.sizes != ()
    before = ops.attention(q, cache, plan, ScoreRules(0.25))
    assert not before[5].any(), "a row without a context"
    plan.refill(later)
    wanted = ops.attention(
        q, cache, ops.plan_attention(inputs(second), size, frozenset([None])), ScoreRules(0.25)
    )
    torch.testing.assert_close(ops.attention(q, cache, plan, ScoreRules(0.25)), wanted, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, wanted)
    third = [n + 1 for n in second]
    after = ops.plan_captured(inputs(third), size, frozenset([None]), 128, None, plan)
    plan.refill(after)
    wanted = ops.attention(
        q, cache, ops.plan_attention(inputs(third), size, frozenset([None])), ScoreRules(0.25)
    )
    torch.testing.assert_close(ops.attention(q, cache, plan, ScoreRules(0.25)), wanted, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="up to 129 cannot grow"):
        ops.plan_captured(inputs([129] * 6), size, frozenset([None]), 128, None, plan)


def test_a_plan_of_other_operators_is_refused():
    (q,) = tensors((1, 4, 16))
    cache = TorchOps().allocate_cache(CacheSpec(2, 16), 1, 16, torch.float32, DEVICE)
    nothing = torch.zeros(1, dtype=torch.int64)
    inputs = AttentionInputs(nothing, nothing, torch.zeros(1, 1, dtype=torch.int32), [1], [1])
    plan = TorchOps().plan_attention(inputs, 16, frozenset([None]))
    with pytest.raises(TypeError, match="not made by triton operators"):
        TritonOps(SHAPE).attention(q, cache, plan, ScoreRules(1.0))
