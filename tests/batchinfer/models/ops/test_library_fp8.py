"""Products of float8 codes by torch's scaled_mm: what it is given, where it is not asked, and from how many rows on it
is taken. A strict function stands in for it. Runs in the interpreter."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import torch.nn.functional as F
import triton

from batchinfer.engine.config import NOTHING
from batchinfer.models.ops import contests, library_products
from batchinfer.models.ops.contests import ProductContest, fastest_operators
from batchinfer.models.ops.gpu_linear import Fp8Linear
from batchinfer.models.ops.layers import CodedWeight
from batchinfer.models.ops.library_products import LibraryFp8
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.block_fp8_matmul import BlockWeight, block_fp8_matmul_reference, quantize_blocks_fp8
from batchinfer_kernels.fp8_matmul import fp8_matmul_reference, quantize_rows_fp8
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.models.ops.scaled_mm_stand_in import ScaledMM

if not triton.knobs.runtime.interpret:
    pytest.skip("on a GPU torch's own is compared when a model is loaded", allow_module_level=True)

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
SIZES = PromptSizes(tokens=48, longest=24, block_size=16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes long for thousands."""
    monkeypatch.setattr(contests, "ROWS", (4, 8, 16, 32))
    monkeypatch.setattr(contests, "ROUNDS", 2)


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
    """A clock by which our kernel and the library take so long for each number of rows, one after the other."""
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


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 48), (208, 144), (256, 640)])
def test_the_library_is_given_what_it_wants(library, outputs, inputs, blocks, rows) -> None:
    """Ends of blocks and groups that are not full, and as many scales as fill four."""
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
def test_a_gate_is_behind_it(library, blocks) -> None:
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
def test_what_the_library_has_no_product_for(monkeypatch, why) -> None:
    capability, weight, bias, dtype = NOT_FOR_IT[why]()
    install(monkeypatch, capability)
    if capability == 0:
        monkeypatch.setattr(library_products, "architecture", lambda: "gfx942")
    assert LibraryFp8.of(weight, bias, dtype) is None


def test_it_is_taken_from_the_number_of_rows_on_from_which_it_is_always_faster(library, caplog) -> None:
    caplog.set_level(logging.INFO)
    layers = [layer(False), layer(False), layer(True)]
    by_rows = [(1, 3), (3, 1), (1, 3), (3, 1)]
    never = [(3, 1), (3, 1), (3, 1), (100, 99)]
    found = contest(layers, *by_rows, *never)
    chosen = found.decide()
    assert chosen == {"float8 by rows, 64 x 48": 32, "float8 by blocks, 64 x 48": None}
    assert "64 x 48: torch multiplies 32 rows and more" in caplog.text
    assert "torch multiplies no rows" in caplog.text
    found.settle(chosen)
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
def test_other_results_are_a_warning(monkeypatch, caplog, capability, offset, said) -> None:
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


def test_all_engines_take_what_the_first_one_chose(library, monkeypatch) -> None:
    """Both round differently. A shape that the first one has not stays with our kernel."""
    ops = TritonOps(AttentionShape(DTYPE, 4, 2, 64))
    rows, blocks = packed(ops), packed(ops, blocks=True)
    said = json.dumps({"products": {rows.form: 32}})
    assert fastest_operators(ops, SIZES, CPU, {}, lambda _: said) is ops
    assert (rows.least_library_rows, blocks.least_library_rows) == (32, None)
    assert library.calls == 2, "it was tried, and not timed"
    monkeypatch.setattr(contests, "MARGIN", float("inf"))
    fastest_operators(ops, SIZES, CPU, {}, lambda choose: choose())
    assert (rows.least_library_rows, blocks.least_library_rows) == (4, 4), "it wins for all"


def test_where_an_engine_died_of_a_choice_nothing_is_tried(library, caplog) -> None:
    ops = TritonOps(AttentionShape(DTYPE, 4, 2, 64))
    rows = packed(ops)
    assert fastest_operators(ops, SIZES, CPU, {}, lambda _: NOTHING) is ops
    assert (rows.least_library_rows, library.calls) == (None, 0)
    assert "an engine died while kernels were compared" in caplog.text


def test_a_library_that_works_in_another_engine_alone_is_not_taken(monkeypatch, caplog) -> None:
    found = layer_on(monkeypatch, 90)
    monkeypatch.setattr(F, "scaled_mm", ScaledMM(capability=100))
    contest([found]).settle({found.form: 4})
    assert found.least_library_rows is None
    assert "NotImplementedError" in caplog.text


def test_a_rank_without_such_layers_hears_the_choice_as_others_do(library) -> None:
    """What the leading rank tells and nobody awaits would be taken for its next message."""
    ops, asked = TritonOps(AttentionShape(DTYPE, 4, 2, 64)), []
    said = json.dumps({"products": {"of another rank": 32}})
    assert fastest_operators(ops, SIZES, CPU, {}, lambda choose: asked.append(choose()) or said) is ops
    assert asked == ['{"products": {}}']


def test_nothing_is_chosen_where_a_row_s_bits_must_not_depend_on_it(library) -> None:
    def asked(_: object) -> str:
        raise AssertionError("a choice was made by time")

    fixed = TritonOps(AttentionShape(DTYPE, 4, 2, 64, deterministic=True))
    assert packed(fixed).library is None
    assert fastest_operators(fixed, SIZES, CPU, {}, asked) is fixed
