"""Experts in bfloat16 by torch's grouped_mm: what it is given, where it is not asked, and from how many rows on it is
taken. A strict function stands in for it. Runs in the interpreter."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from batchinfer.models.ops import contests, library_products
from batchinfer.models.ops.contests import fastest_operators
from batchinfer.models.ops.gpu_experts import TritonExperts
from batchinfer.models.ops.layers import ExpertWeights
from batchinfer.models.ops.library_products import LibraryGrouped
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.experts import Choice
from batchinfer_kernels.gpu.attention_plan import AttentionShape

if not triton.knobs.runtime.interpret:
    pytest.skip("on a GPU torch's own is compared when a model is loaded", allow_module_level=True)

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
EXPERTS, HIDDEN, INNER = 5, 64, 32
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


class GroupedMM:
    """torch's grouped_mm of rows and one weight a group, as strict as torch is on a GPU. Rows that are in no group are
    NaN. `calls` has the rows of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        *,
        offs: Tensor | None = None,
        bias: None = None,
        out_dtype: None = None,
    ) -> Tensor:
        assert mat_a.dtype == mat_b.dtype == DTYPE
        assert mat_a.dim() == 2
        assert mat_b.dim() == 3
        assert mat_a.shape[1] == mat_b.shape[1]
        assert mat_a.stride(1) == 1
        assert mat_a.stride(0) >= mat_a.shape[1]
        assert mat_a.stride(0) % 8 == 0
        assert mat_b.stride(1) == 1, "the weights are column-major"
        assert mat_b.stride(2) >= mat_b.shape[1]
        assert mat_b.stride(2) % 8 == 0
        assert mat_a.data_ptr() % 16 == mat_b.data_ptr() % 16 == 0
        assert bias is out_dtype is None
        assert offs is not None
        assert offs.dtype == torch.int32
        assert offs.shape == mat_b.shape[:1]
        assert bool((offs.diff() >= 0).all())
        assert int(offs[-1]) <= len(mat_a)
        self.calls.append(len(mat_a))
        y = torch.full((len(mat_a), mat_b.shape[2]), float("nan"), dtype=DTYPE)
        first = 0
        for end, weight in zip(offs.tolist(), mat_b, strict=True):
            y[first:end] = (mat_a[first:end].float() @ weight.float()).to(DTYPE)
            first = end
        return y


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> GroupedMM:
    found = GroupedMM()
    monkeypatch.setattr(F, "grouped_mm", found)
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    monkeypatch.setattr(contests, "ROWS", (4, 16))
    return found


def weights(inner: int = INNER, dtype: torch.dtype = DTYPE) -> tuple[ExpertWeights, ExpertWeights]:
    torch.manual_seed(0)
    into, back = torch.randn(EXPERTS, 2 * inner, HIDDEN) / 8, torch.randn(EXPERTS, HIDDEN, inner) / 4
    return ExpertWeights(into.to(dtype)), ExpertWeights(back.to(dtype))


def packed(deterministic: bool = False) -> tuple[TritonOps, TritonExperts]:
    ops = TritonOps(AttentionShape(DTYPE, 4, 2, 64, deterministic=deterministic))
    experts = ops.pack_experts(*weights(), "silu")
    assert isinstance(experts, TritonExperts)
    return ops, experts


def chosen(tokens: int, experts: Tensor) -> Choice:
    return Choice(experts, torch.rand(tokens, 2))


@pytest.mark.parametrize("skipped", [False, True])
def test_results_are_those_of_our_kernels(library, skipped) -> None:
    """Also where a token's other expert is another rank's, and no expert has some rows; one has no row at all."""
    _, experts = packed()
    x, given = torch.randn(9, HIDDEN, dtype=DTYPE), torch.randint(0, EXPERTS - 1, (9, 2))
    choice = chosen(9, given)
    if skipped:
        given[::2, 1] = EXPERTS
        choice.weights[::2, 1] = 0.0
    wanted = experts(x, choice)
    assert library.calls == []
    experts.least_library_rows = 18
    torch.testing.assert_close(experts(x, choice), wanted, atol=2e-2, rtol=2e-2)
    assert library.calls == [18, 18]
    experts.least_library_rows = 19
    assert torch.equal(experts(x, choice), wanted)
    assert len(library.calls) == 2


def test_it_is_chosen_by_time(library, monkeypatch) -> None:
    ops, experts = packed()
    sizes = PromptSizes(tokens=64, longest=24, block_size=16)
    assert fastest_operators(ops, sizes, CPU, {}, lambda _: '{"products": {"another": 8}}') is ops
    assert experts.least_library_rows is None
    for margin, least in ((float("inf"), 4), (0.0, None)):
        monkeypatch.setattr(contests, "MARGIN", margin)
        fastest_operators(ops, sizes, CPU, {}, lambda choose: choose())
        assert experts.least_library_rows == least
    assert experts.form == "5 experts in bfloat16, 64 x 64, silu"
    assert int(experts.loads.sum()) == 0, "what is timed is nobody's work"


def test_nothing_is_chosen_where_a_row_s_bits_must_not_depend_on_it(library) -> None:
    ops, _ = packed(deterministic=True)
    assert ops.library_layers is None


def test_what_the_library_has_no_product_for(library, monkeypatch) -> None:
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
