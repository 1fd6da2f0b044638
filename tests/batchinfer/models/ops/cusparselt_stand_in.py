"""Functions in cuSPARSELt's place: what our code uses of torch's interface to it, strict about arguments as torch's
source (aten/src/ATen/native/sparse/cuda/cuSPARSELtOps.cpp, 2.11 to 2.13) and its table of sizes are."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)


@dataclass
class CuSparseLt:
    """A fake cuSPARSELt.

    Attributes:
        dtypes: supported dtypes.
        products: number of products.
    """

    dtypes: tuple[torch.dtype, ...] = HALVES
    products: int = 0
    _weights: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # by address: it is kept, too

    def compress(self, weight: Tensor) -> Tensor:
        """Check the pattern of zeros: the library silently changes a weight that is not 2:4 sparse."""
        outputs, inputs = weight.shape
        assert weight.dtype in self.dtypes
        assert weight.is_contiguous()
        assert outputs % 16 == 0
        assert inputs % 16 == 0
        assert ((weight.view(outputs, -1, 4) != 0).sum(-1) <= 2).all(), "not 2:4"
        kept = weight.new_empty(weight.numel() * 9 // 16)
        self._weights[kept.data_ptr()] = kept, weight.clone()
        return kept

    def multiply(
        self,
        compressed_A: Tensor,
        dense_B: Tensor,
        bias: Tensor | None = None,
        alpha: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        transpose_result: bool = False,
        alg_id: int = 0,
    ) -> Tensor:
        kept, weight = self._weights[compressed_A.data_ptr()]
        inputs, columns = dense_B.shape
        assert (kept.shape, alpha, out_dtype, alg_id) == (compressed_A.shape, None, None, 0)
        assert dense_B.dtype == weight.dtype
        assert (columns % 8, columns > 0) == (0, True)
        assert compressed_A.numel() * 16 // 9 // inputs == len(weight)
        # Read by rows if contiguous, otherwise as the transpose of a contiguous tensor
        assert dense_B.is_contiguous() or dense_B.t().is_contiguous()
        assert bias is None or (bias.dtype, bias.shape) == (weight.dtype, (len(weight),))
        self.products += 1
        y = weight.float() @ dense_B.float()
        y = (y if bias is None else y + bias.float()[:, None]).to(weight.dtype)
        return y.t().contiguous() if transpose_result else y


def stand_in(monkeypatch: pytest.MonkeyPatch, dtypes: tuple[torch.dtype, ...] = HALVES) -> CuSparseLt:
    made = CuSparseLt(dtypes)
    monkeypatch.setattr(torch, "_cslt_compress", made.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", made.multiply)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    return made
