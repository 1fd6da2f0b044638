"""Products that batchinfer or a library computes on a GPU: float8 values by torch's scaled_mm, gate and up in one
launch by quack-kernels, experts in bfloat16 by torch's grouped_mm. Tests the library's arguments, the layers that it
cannot multiply, and the choice by number of rows. Strict functions replace the libraries. Runs in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from batchinfer.engine.config import NO_CHOICE
from batchinfer.models.ops import contests, library_products
from batchinfer.models.ops.contests import ProductContest, fastest_operators
from batchinfer.models.ops.gpu_experts import TritonExperts
from batchinfer.models.ops.gpu_linear import Fp8Linear
from batchinfer.models.ops.layers import ActivatedLinear, CodedWeight, ExpertWeights
from batchinfer.models.ops.library_products import ChosenGated, LibraryFp8, LibraryGated, LibraryGrouped
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.block_fp8_matmul import BlockWeight, block_fp8_matmul_reference
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference, quantize_rows_fp8
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.models.ops.product_stand_ins import GroupedMM, Quack, ScaledMM
from tests.kernels.rounded_weights import quantize_blocks_fp8

if not triton.knobs.runtime.interpret:
    pytest.skip("on a GPU the libraries' own are compared when a model is loaded", allow_module_level=True)

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
INNER, HIDDEN, EXPERTS = 48, 64, 5
SIZES = PromptSizes(tokens=48, longest=24, block_size=16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


def triton_ops(deterministic: bool = False) -> TritonOps:
    return TritonOps(AttentionShape(DTYPE, 4, 2, 64, deterministic=deterministic))


# --- float8


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use few rows, as the interpreter is slow."""
    monkeypatch.setattr(contests, "ROWS", (4, 8, 16, 32))
    monkeypatch.setattr(contests, "ROUNDS", 1)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ScaledMM:
    return install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch, capability: int = 90, offset: float = 0.0) -> ScaledMM:
    found = ScaledMM(capability, offset)
    monkeypatch.setattr(F, "scaled_mm", found)
    monkeypatch.setattr(library_products, "architecture", lambda: str(capability))
    return found


def coded(outputs: int, inputs: int, blocks: bool) -> CodedWeight:
    torch.manual_seed(outputs)
    values = torch.randn(outputs, inputs)
    if not blocks:
        return CodedWeight(*quantize_rows_fp8(values))
    weight = quantize_blocks_fp8(values)
    return CodedWeight(weight.codes, weight.scales, weight.lines)


def layer(blocks: bool, outputs: int = 64, inputs: int = 48, activation=None, bias=None) -> Fp8Linear:
    weight = coded(outputs, inputs, blocks)
    return Fp8Linear(weight, bias, activation, False, LibraryFp8.of(weight, bias, DTYPE))


def clocked(*took: tuple[float, float]) -> Iterator[float]:
    """Yield times of a clock for which our kernel and the library take these seconds per number of rows."""
    now = 0.0
    for pair in took:
        yield now
        for _ in range(contests.ROUNDS):
            for seconds in pair:
                yield now
                now += seconds
                yield now
            yield 0.0  # there is time left


def contest(layers: list[Fp8Linear], *took: tuple[float, float], most: int = 10**6) -> ProductContest:
    clock = clocked(*took)
    return ProductContest(layers, most, CPU, lambda: next(clock))


@pytest.mark.sample(9)
@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (208, 144), (256, 640)])
def test_arguments_of_the_library_are_as_required(library, outputs, inputs, blocks, rows) -> None:
    """Partial blocks and groups, and a number of scales that is a multiple of four."""
    bias = torch.randn(outputs, dtype=DTYPE) if outputs != 256 else None
    weight, x = coded(outputs, inputs, blocks), torch.randn(rows, inputs, dtype=DTYPE)
    found = LibraryFp8.of(weight, bias, DTYPE)
    assert found is not None
    if weight.lines is None:
        wanted = fp8_matmul_reference(x, weight.codes, weight.scales, bias)
    else:
        wanted = block_fp8_matmul_reference(x, BlockWeight(weight.codes, weight.scales, weight.lines), bias)
    torch.testing.assert_close(found(x), wanted, atol=2e-2, rtol=2e-2)
    assert library.calls == 1


@pytest.mark.parametrize("blocks", [False, True])
def test_a_gate_is_applied_after_the_library_product(library, blocks) -> None:
    ours, theirs = layer(blocks, activation="silu").trial(7, CPU)
    torch.testing.assert_close(theirs(), ours(), atol=2e-2, rtol=2e-2)
    assert theirs().shape == (7, 32)


def uneven(weight: CodedWeight) -> CodedWeight:
    assert weight.lines is not None
    return CodedWeight(weight.codes, weight.scales, weight.lines.roll(1))


NOT_FOR_IT = {
    "an older GPU": lambda: (80, coded(64, 48, False), None, DTYPE),
    "AMD's": lambda: (0, coded(64, 48, False), None, DTYPE),
    "blocks on a newer GPU": lambda: (100, coded(64, 48, True), None, DTYPE),
    "float32": lambda: (90, coded(64, 48, False), None, torch.float32),
    "inputs of no multiple": lambda: (90, coded(64, 40, False), None, DTYPE),
    "outputs of no multiple": lambda: (90, coded(72, 48, False), None, DTYPE),
    "blocks that are not of 128 outputs": lambda: (90, uneven(coded(256, 48, True)), None, DTYPE),
    "a bias of another dtype": lambda: (90, coded(64, 48, False), torch.zeros(64), DTYPE),
}


@pytest.mark.parametrize("why", NOT_FOR_IT)
def test_products_that_the_library_does_not_support(monkeypatch, why) -> None:
    capability, weight, bias, dtype = NOT_FOR_IT[why]()
    install(monkeypatch, capability)
    if capability == 0:
        monkeypatch.setattr(library_products, "architecture", lambda: "gfx942")
    assert LibraryFp8.of(weight, bias, dtype) is None


def test_the_library_is_used_from_the_row_count_where_it_is_always_faster(library, caplog) -> None:
    caplog.set_level(logging.INFO)
    layers = [layer(False), layer(False), layer(True)]
    by_rows = [(1, 3), (3, 1), (1, 3), (3, 1)]
    never = [(3, 1), (3, 1), (3, 1), (100, 99)]
    found = contest(layers, *by_rows, *never)
    chosen = found.decide()
    assert chosen == {"float8 by rows, 64 x 48": 32, "float8 by blocks, 64 x 48": None}
    assert "64 x 48: torch multiplies 32 rows and more" in caplog.text
    assert "torch multiplies no rows" in caplog.text
    found.apply(chosen)
    library.calls = 0
    for rows, calls in ((31, 0), (32, 1)):
        x = torch.randn(rows, 48, dtype=DTYPE)
        assert layers[0](x).shape == layers[2](x).shape == (rows, 64)
        assert library.calls == calls, "of the one layer, and never of blocks"


def test_rows_beyond_a_step_are_not_timed(library, monkeypatch) -> None:
    one, sizes = layer(False), []
    trial = one.trial
    monkeypatch.setattr(one, "trial", lambda rows, device: sizes.append(rows) or trial(rows, device))
    contest([one], *[(1, 3)] * 3, most=10).decide()
    assert sizes == [contests.ODD_ROWS, 4, 8, 10]


@pytest.mark.parametrize(
    ("capability", "offset", "said"), [(90, 50.0, "differ"), (90, float("nan"), "by nan where")]
)
def test_wrong_results_are_a_warning(monkeypatch, caplog, capability, offset, said) -> None:
    install(monkeypatch, capability, offset)
    assert contest([layer(False)], *[(3, 1)] * 4).decide() == {"float8 by rows, 64 x 48": None}
    assert said in caplog.text


def test_a_library_that_refuses_is_a_warning(monkeypatch, caplog) -> None:
    found = layer_on(monkeypatch, 90)
    monkeypatch.setattr(F, "scaled_mm", ScaledMM(capability=100))
    assert contest([found], *[(3, 1)] * 4).decide() == {found.form: None}
    assert "NotImplementedError: DeepSeek style" in caplog.text
    assert "batchinfer computes it by itself" in caplog.text


def layer_on(monkeypatch: pytest.MonkeyPatch, capability: int) -> Fp8Linear:
    install(monkeypatch, capability)
    return layer(True)


def packed(ops: TritonOps, blocks: bool = False) -> Fp8Linear:
    found = ops.pack_linear(coded(64, 48, blocks))
    assert isinstance(found, Fp8Linear)
    return found


def test_all_engines_use_the_choice_of_the_first_one(library, monkeypatch) -> None:
    """The ways round differently. A shape that the first engine does not have uses our kernel."""
    ops = triton_ops()
    rows, blocks = packed(ops), packed(ops, blocks=True)
    said = json.dumps({"products": {rows.form: 32}})
    assert fastest_operators(ops, SIZES, CPU, {}, lambda _: said) is ops
    assert (rows.least_library_rows, blocks.least_library_rows) == (32, None)
    assert library.calls == 2, "it was tried, and not timed"
    monkeypatch.setattr(contests, "MARGIN", float("inf"))
    fastest_operators(ops, SIZES, CPU, {}, lambda choose: choose())
    assert (rows.least_library_rows, blocks.least_library_rows) == (4, 4), "it wins for all"


def test_after_an_engine_died_of_a_choice_nothing_is_tried(library, caplog) -> None:
    ops = triton_ops()
    rows = packed(ops)
    assert fastest_operators(ops, SIZES, CPU, {}, lambda _: NO_CHOICE) is ops
    assert (rows.least_library_rows, library.calls) == (None, 0)
    assert "an engine died while kernels were compared" in caplog.text


def test_a_library_that_works_only_in_another_engine_is_not_used(monkeypatch, caplog) -> None:
    found = layer_on(monkeypatch, 90)
    monkeypatch.setattr(F, "scaled_mm", ScaledMM(capability=100))
    contest([found]).apply({found.form: 4})
    assert found.least_library_rows is None
    assert "NotImplementedError" in caplog.text


def test_a_rank_without_such_layers_receives_the_choice_too(library) -> None:
    """Otherwise the leading rank's broadcast would be taken for its next message."""
    ops, asked = triton_ops(), []
    said = json.dumps({"products": {"of another rank": 32}})
    assert fastest_operators(ops, SIZES, CPU, {}, lambda choose: asked.append(choose()) or said) is ops
    assert asked == ['{"products": {}}']


# --- gate and up


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    package, interface = ModuleType("quack"), Quack()
    package.__spec__ = ModuleSpec("quack", None)
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    return interface


def gate_weight(inner: int = INNER, hidden: int = HIDDEN, dtype: torch.dtype = DTYPE) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(2 * inner, hidden) / 8).to(dtype)


def packed_gated(activation: Any = "silu", deterministic: bool = False) -> tuple[TritonOps, Any]:
    ops = triton_ops(deterministic)
    return ops, ops.pack_gated(gate_weight(), None, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_results_equal_two_launches(quack: Quack, activation: Any) -> None:
    _, layer = packed_gated(activation)
    assert isinstance(layer, ChosenGated)
    assert (layer.in_features, layer.out_features) == (HIDDEN, INNER)
    x = torch.randn(9, HIDDEN, dtype=DTYPE)
    wanted = layer(x)
    torch.testing.assert_close(wanted, gated_activation_reference(F.linear(x, gate_weight()), activation))
    assert quack.calls == []
    layer.least_library_rows = 9
    torch.testing.assert_close(layer(x), wanted, atol=2e-2, rtol=2e-2)
    assert quack.calls == [9]
    assert torch.equal(layer(x[:8]), wanted[:8])
    assert quack.calls == [9]


@pytest.mark.parametrize("broken", ["raises", "is absent", "computes something else"])
def test_a_broken_library_is_replaced_by_two_launches(quack: Quack, monkeypatch, caplog, broken: str) -> None:
    """Also in an engine that did not make the choice."""
    monkeypatch.setattr(contests, "MARGIN", float("inf"))
    if broken == "is absent":
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    quack.broken = RuntimeError("no kernel\nof this size") if broken == "raises" else None
    quack.error = 0.1 if broken.startswith("computes") else 0.0
    for agreed in (
        lambda choose: choose(),
        lambda _: '{"products": {"gate and up in bfloat16, 96 x 64, silu": 4}}',
    ):
        ops, layer = packed_gated()
        caplog.clear()
        fastest_operators(ops, SIZES, CPU, {}, agreed)
        assert layer.least_library_rows is None
        assert "quack-kernels cannot multiply gate and up in bfloat16, 96 x 64, silu (" in caplog.text


def test_adapted_rows_take_two_launches(quack: Quack) -> None:
    _, layer = packed_gated()
    layer.least_library_rows = 1

    class Doubled:
        def add_to(self, y: Tensor) -> Tensor:
            return 2 * y

    x = torch.randn(5, HIDDEN, dtype=DTYPE)
    both = F.linear(x, gate_weight())
    torch.testing.assert_close(layer.adapted(x, Doubled()), gated_activation_reference(2 * both, "silu"))
    assert quack.calls == []


def test_layers_without_a_library_product(quack: Quack, monkeypatch) -> None:
    whole = gate_weight()
    assert LibraryGated.of(whole, None, "silu") is not None
    assert LibraryGated.of(gate_weight(dtype=torch.float16), None, "silu") is not None
    assert LibraryGated.of(whole, torch.zeros(2 * INNER, dtype=DTYPE), "silu") is None
    for other in (
        gate_weight(inner=44),
        gate_weight(hidden=60),
        gate_weight(dtype=torch.float32),
        gate_weight().t().contiguous().t(),
    ):
        assert LibraryGated.of(other, None, "silu") is None
    for activation in ("gelu", "clamped_swiglu"):
        assert LibraryGated.of(whole, None, activation) is None
    assert not isinstance(packed_gated(deterministic=True)[1], ActivatedLinear)
    for capability in ("80", "89", "120", "gfx942", ""):
        monkeypatch.setattr(library_products, "architecture", lambda found=capability: found)
        assert LibraryGated.of(whole, None, "silu") is None
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    monkeypatch.setitem(sys.modules, "quack", None)
    assert LibraryGated.of(whole, None, "silu") is None


# --- experts


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> GroupedMM:
    found = GroupedMM()
    monkeypatch.setattr(F, "grouped_mm", found)
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    return found


def weights(inner: int = INNER - 16, dtype: torch.dtype = DTYPE) -> tuple[ExpertWeights, ExpertWeights]:
    torch.manual_seed(0)
    into, back = torch.randn(EXPERTS, 2 * inner, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, inner) / 4
    return ExpertWeights(into.to(dtype)), ExpertWeights(back.to(dtype))


def packed_experts(deterministic: bool = False) -> tuple[TritonOps, TritonExperts]:
    ops = triton_ops(deterministic)
    experts = ops.pack_experts(*weights(), "silu")
    assert isinstance(experts, TritonExperts)
    return ops, experts


def chosen(tokens: int, experts: Tensor) -> Choice:
    return Choice(experts, torch.rand(tokens, 2))


@pytest.mark.parametrize("skipped", [False, True])
def test_results_equal_our_kernels(grouped, skipped) -> None:
    """Another rank has a token's other expert, some rows have no expert, and one expert has no row."""
    _, experts = packed_experts()
    x, given = torch.randn(9, HIDDEN, dtype=DTYPE), torch.randint(0, EXPERTS - 1, (9, 2))
    choice = chosen(9, given)
    if skipped:
        given[::2, 1] = EXPERTS
        choice.weights[::2, 1] = 0.0
    wanted = experts(x, choice)
    assert grouped.calls == []
    experts.least_library_rows = 18
    torch.testing.assert_close(experts(x, choice), wanted, atol=2e-2, rtol=2e-2)
    assert grouped.calls == [18, 18]
    experts.least_library_rows = 19
    assert torch.equal(experts(x, choice), wanted)
    assert len(grouped.calls) == 2


def test_experts_that_the_library_has_no_product_for(grouped, monkeypatch) -> None:
    into, back = weights()
    assert LibraryGrouped.of(into, back, "silu") is not None
    biased = ExpertWeights(back.weight, torch.zeros(EXPERTS, HIDDEN, dtype=DTYPE))
    strided = ExpertWeights(back.weight.transpose(1, 2).contiguous().transpose(1, 2))
    scaled = ExpertWeights(back.weight, scales=torch.ones(EXPERTS, HIDDEN))
    for other in (biased, strided, scaled):
        assert LibraryGrouped.of(into, other, "silu") is None
    assert LibraryGrouped.of(*weights(inner=36), "silu") is None
    assert LibraryGrouped.of(*weights(dtype=torch.float16), "silu") is None
    for capability in ("80", "89", "120", "gfx942", ""):
        monkeypatch.setattr(library_products, "architecture", lambda found=capability: found)
        assert LibraryGrouped.of(into, back, "silu") is None


# --- all products


@pytest.mark.parametrize("library_of", ["quack", "grouped"])
def test_the_library_is_chosen_by_time(
    request: pytest.FixtureRequest, monkeypatch, caplog, library_of: str
) -> None:
    """If another engine's choice does not contain these layers, our kernels are used."""
    library = request.getfixturevalue(library_of)
    ops, layer = packed_gated() if library_of == "quack" else packed_experts()
    assert fastest_operators(ops, SIZES, CPU, {}, lambda _: '{"products": {"another": 8}}') is ops
    assert layer.least_library_rows is None
    library.calls.clear()
    with caplog.at_level(logging.INFO):
        for margin, least in ((float("inf"), 4), (0.0, None)):
            monkeypatch.setattr(contests, "MARGIN", margin)
            fastest_operators(ops, SIZES, CPU, {}, lambda choose: choose())
            assert layer.least_library_rows == least
    named = (
        "gate and up in bfloat16, 96 x 64, silu"
        if library_of == "quack"
        else "5 experts in bfloat16, 64 x 64, silu"
    )
    assert layer.form == named
    assert f"{named}: {layer.library_name} multiplies 4 rows and more" in caplog.text
    if library_of == "quack":
        assert {*library.calls} == {contests.ODD_ROWS, *contests.ROWS}
    else:
        assert int(layer.loads.sum()) == 0, "a timed call counts no tokens"


def test_deterministic_rows_use_no_library(library) -> None:
    def asked(_: object) -> str:
        raise AssertionError("a choice was made by time")

    fixed = triton_ops(deterministic=True)
    assert packed(fixed).library is None
    assert fastest_operators(fixed, SIZES, CPU, {}, asked) is fixed
    for ops in (packed_gated(deterministic=True)[0], packed_experts(deterministic=True)[0]):
        assert ops.library_layers is None
