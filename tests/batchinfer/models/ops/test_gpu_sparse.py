"""Tests products of 2:4 sparse weights on a GPU with a fake cuSPARSELt."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from batchinfer.core.errors import Unavailable
from batchinfer.models.ops.choose import choose_ops
from batchinfer.models.ops.gpu_linear import LibraryLinear
from batchinfer.models.ops.gpu_sparse import SparseLinear, is_half, sparse_linear
from batchinfer_kernels.arithmetic import WeightForm
from tests.batchinfer.models.ops.cusparselt_stand_in import HALVES, stand_in

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no triton", allow_module_level=True)

FORMS = frozenset({WeightForm("sparse", stored=True)})


def half(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    values = torch.randn(outputs, inputs, generator=generator)
    order = torch.rand(outputs, inputs // 4, 4, generator=generator).argsort(-1)
    return (values * (order < 2).view(outputs, inputs)).to(dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_any_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, biased: bool
) -> None:
    library = stand_in(monkeypatch)
    weight, bias = half(48, 32, dtype), torch.randn(48).to(dtype) if biased else None
    made = sparse_linear(weight, bias)
    assert isinstance(made, SparseLinear)
    assert (made.in_features, made.out_features) == (32, 48)
    for rows in (1, 2, 15, 16, 33):
        x = torch.randn(rows, 64).to(dtype)[:, :32]  # of a wider tensor
        got = made(x)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got, linear(x.float(), weight.float(), None if bias is None else bias.float()).to(dtype)
        )
    assert library.products == 5


def test_weights_that_are_not_2_4_sparse_are_multiplied_densely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in(monkeypatch)
    weight = half(32, 32, torch.float16)
    assert is_half(weight)
    weight[7, 4:7] = 1
    assert not is_half(weight)
    made = sparse_linear(weight, None)
    assert isinstance(made, LibraryLinear)
    assert "a weight (32, 32) that the checkpoint calls 2:4 sparse has more than two values" in caplog.text
    x = torch.randn(3, 32).half()
    assert torch.equal(made(x), linear(x, weight))
    assert isinstance(sparse_linear(half(24, 32, torch.float16), None), LibraryLinear)


def test_sparse_products_are_unsupported_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    with pytest.raises(
        Unavailable, match=r"stored needs .* without cuSPARSELt.*take model.quantization: none"
    ):
        choose_ops(gpu, torch.bfloat16, 4, 64, forms=FORMS)
    stand_in(monkeypatch)
    assert choose_ops(gpu, torch.bfloat16, 4, 64, forms=FORMS).linear("sparse") == "sparse"
    with pytest.raises(Unavailable, match=r"cuSPARSELt multiplies no weights in float32"):
        choose_ops(gpu, torch.float32, 4, 64, forms=FORMS)
    with pytest.raises(Unavailable, match=r"a CPU multiplies zeros, too"):
        choose_ops(torch.device("cpu"), torch.float32, 4, 64, forms=FORMS)
