"""Gate and up in one launch by quack-kernels: what it is given, where it is not asked, and from how many rows on it is
taken. A strict module stands in for it. Runs in the interpreter."""

from __future__ import annotations

import importlib.util
import logging
import sys
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

from batchinfer.models.ops import contests, library_products
from batchinfer.models.ops.contests import fastest_operators
from batchinfer.models.ops.layers import ActivatedLinear
from batchinfer.models.ops.library_products import ChosenGated, LibraryGated
from batchinfer.models.ops.prompts.trial import PromptSizes
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.gated_activation import gated_activation_reference
from batchinfer_kernels.gpu.attention_plan import AttentionShape

if not triton.knobs.runtime.interpret:
    pytest.skip("on a GPU quack's own is compared when a model is loaded", allow_module_level=True)

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
INNER, HIDDEN = 48, 64
SIZES = PromptSizes(tokens=64, longest=24, block_size=16)
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy


class Quack(ModuleType):
    """quack.gemm_interface of 0.6.5, as strict about a gated product as its kernels are. `calls` has the rows of each
    call."""

    def __init__(self) -> None:
        super().__init__("quack.gemm_interface")
        self.calls: list[int] = []
        self.broken: Exception | None = None
        self.error = 0.0  # of results

    def gemm_gated(
        self, A: Tensor, B: Tensor, C: None = None, bias: None = None, activation: str | None = None, *,
        store_preact: bool = True, tuned: bool = True, concat_layout: tuple[str, ...] | None = None,
    ) -> tuple[Tensor | None, Tensor]:  # fmt: skip
        if self.broken is not None:
            raise self.broken
        assert activation in ("swiglu", "geglu"), "others are no names, or compute something else"
        assert concat_layout == ("B",), "gate's and up's rows would be taken to alternate"
        assert not tuned, "a search for the best tile compiles for minutes"
        assert not store_preact, "gate and up would be written after all"
        assert C is bias is None
        assert A.dtype == B.dtype
        assert A.dtype in (torch.bfloat16, torch.float16)
        assert A.dim() == B.dim() == 2
        assert A.shape[1] == B.shape[0]
        assert A.stride(1) == 1
        assert A.stride(0) % 8 == 0
        assert B.stride(0) == 1, "B is the transposed weight, and not a copy"
        assert B.stride(1) % 8 == 0
        assert B.shape[1] % 16 == 0
        assert A.data_ptr() % 16 == B.data_ptr() % 16 == 0
        self.calls.append(len(A))
        gate, up = (A.float() @ B.float()).chunk(2, 1)
        active = F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")
        return None, (active * up * (1 + self.error)).to(A.dtype)


@pytest.fixture
def quack(monkeypatch: pytest.MonkeyPatch) -> Quack:
    package, interface = ModuleType("quack"), Quack()
    package.__spec__ = ModuleSpec("quack", None)
    monkeypatch.setitem(sys.modules, "quack", package)
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    monkeypatch.setattr(contests, "ROWS", (4, 16))
    return interface


def weight(inner: int = INNER, hidden: int = HIDDEN, dtype: torch.dtype = DTYPE) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(2 * inner, hidden) / 8).to(dtype)


def packed(activation: Any = "silu", deterministic: bool = False) -> tuple[TritonOps, Any]:
    ops = TritonOps(AttentionShape(DTYPE, 4, 2, 64, deterministic=deterministic))
    return ops, ops.pack_gated(weight(), None, activation)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_results_are_those_of_two_launches(quack: Quack, activation: Any) -> None:
    _, layer = packed(activation)
    assert isinstance(layer, ChosenGated)
    assert (layer.in_features, layer.out_features) == (HIDDEN, INNER)
    x = torch.randn(9, HIDDEN, dtype=DTYPE)
    wanted = layer(x)
    torch.testing.assert_close(wanted, gated_activation_reference(F.linear(x, weight()), activation))
    assert quack.calls == []
    layer.least_library_rows = 9
    torch.testing.assert_close(layer(x), wanted, atol=2e-2, rtol=2e-2)
    assert quack.calls == [9]
    assert torch.equal(layer(x[:8]), wanted[:8])
    assert quack.calls == [9]


def test_it_is_chosen_by_time(quack: Quack, monkeypatch, caplog) -> None:
    ops, layer = packed()
    with caplog.at_level(logging.INFO):
        for margin, least in ((float("inf"), 4), (0.0, None)):
            monkeypatch.setattr(contests, "MARGIN", margin)
            fastest_operators(ops, SIZES, CPU, {}, lambda choose: choose())
            assert layer.least_library_rows == least
    assert layer.form == "gate and up in bfloat16, 96 x 64, silu"
    assert "96 x 64, silu: quack-kernels multiplies 4 rows and more" in caplog.text
    assert {*quack.calls} == {contests.ODD_ROWS, 4, 16}


@pytest.mark.parametrize("broken", ["raises", "is absent", "computes something else"])
def test_where_it_is_broken_there_are_two_launches(quack: Quack, monkeypatch, caplog, broken: str) -> None:
    """Also in an engine that did not choose."""
    monkeypatch.setattr(contests, "MARGIN", float("inf"))
    if broken == "is absent":
        monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    quack.broken = RuntimeError("no kernel\nof this size") if broken == "raises" else None
    quack.error = 0.1 if broken.startswith("computes") else 0.0
    for agreed in (
        lambda choose: choose(),
        lambda _: '{"products": {"gate and up in bfloat16, 96 x 64, silu": 4}}',
    ):
        ops, layer = packed()
        caplog.clear()
        fastest_operators(ops, SIZES, CPU, {}, agreed)
        assert layer.least_library_rows is None
        assert "quack-kernels cannot multiply gate and up in bfloat16, 96 x 64, silu (" in caplog.text


def test_adapted_rows_take_two_launches(quack: Quack) -> None:
    _, layer = packed()
    layer.least_library_rows = 1

    class Doubled:
        def onto(self, y: Tensor) -> Tensor:
            return 2 * y

    x = torch.randn(5, HIDDEN, dtype=DTYPE)
    both = F.linear(x, weight())
    torch.testing.assert_close(layer.adapted(x, Doubled()), gated_activation_reference(2 * both, "silu"))
    assert quack.calls == []


def test_what_it_is_not_asked_for(quack: Quack, monkeypatch) -> None:
    whole = weight()
    assert LibraryGated.of(whole, None, "silu") is not None
    assert LibraryGated.of(weight(dtype=torch.float16), None, "silu") is not None
    assert LibraryGated.of(whole, torch.zeros(2 * INNER, dtype=DTYPE), "silu") is None
    for other in (
        weight(inner=44),
        weight(hidden=60),
        weight(dtype=torch.float32),
        weight().t().contiguous().t(),
    ):
        assert LibraryGated.of(other, None, "silu") is None
    for activation in ("gelu", "clamped_swiglu"):
        assert LibraryGated.of(whole, None, activation) is None
    ops, layer = packed(deterministic=True)
    assert not isinstance(layer, ActivatedLinear)
    assert ops.library_layers is None
    for capability in ("80", "89", "120", "gfx942", ""):
        monkeypatch.setattr(library_products, "architecture", lambda found=capability: found)
        assert LibraryGated.of(whole, None, "silu") is None
    monkeypatch.setattr(library_products, "architecture", lambda: "90")
    monkeypatch.setitem(sys.modules, "quack", None)
    assert LibraryGated.of(whole, None, "silu") is None
