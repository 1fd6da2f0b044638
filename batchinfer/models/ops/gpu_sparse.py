"""Linear layers of a GPU whose weights have two zeros in each four inputs, multiplied by cuSPARSELt without them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.nn.functional import pad

from batchinfer.models.ops.gpu_linear import LibraryLinear
from batchinfer.models.ops.layers import Linear
from batchinfer_kernels.arithmetic import SPARSE_KEPT, SPARSE_QUAD, SPARSE_SIZES

DTYPES = (torch.bfloat16, torch.float16)
_log = logging.getLogger(__name__)


def why_not_sparse(dtype: torch.dtype) -> str | None:
    """Return why a GPU's products cannot leave out zeros here; None: they can."""
    if dtype not in DTYPES:
        return f"cuSPARSELt multiplies no weights in {str(dtype).removeprefix('torch.')}"
    if not torch.backends.cusparselt.is_available():
        return "this torch was built without cuSPARSELt, which multiplies 2:4 sparse weights"
    return None


def sparse_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the product with a weight that a checkpoint calls 2:4 sparse. One that is not, or of other sizes than
    cuSPARSELt takes, is multiplied with its zeros."""
    if any(size % SPARSE_SIZES for size in weight.shape):
        return LibraryLinear(weight, bias)
    if not is_half(weight):
        _log.warning(
            "a weight (%d, %d) that the checkpoint calls 2:4 sparse has more than two values in four inputs; it is "
            "multiplied as it is",
            *weight.shape,
        )
        return LibraryLinear(weight, bias)
    return SparseLinear(weight, bias)


def is_half(weight: Tensor) -> bool:
    """Whether no four inputs of an output (N, K), next to one another, have more than two values."""
    found = (weight.view(len(weight), -1, SPARSE_QUAD) != 0).sum(-1, dtype=torch.int8)
    return bool((found <= SPARSE_KEPT).all())


class SparseLinear(Linear):
    """The values that are not zero, and where they stand: 9/16 of the weight. Rows are rounded up to SPARSE_SIZES."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight`: (N, K) of DTYPES, multiples of SPARSE_SIZES, whose zeros `is_half` has found."""
        self.out_features, self.in_features = weight.shape
        self._kept, self._bias = torch._cslt_compress(weight.contiguous()), bias

    def __call__(self, x: Tensor) -> Tensor:
        rows = len(x)
        padded = pad(x, (0, 0, 0, -rows % SPARSE_SIZES)).contiguous()
        # The product is that of the weight and the rows below one another, and written the other way round
        y = torch._cslt_sparse_mm(self._kept, padded.t(), bias=self._bias, transpose_result=True)
        return y[:rows]
