"""Linear layers with 2:4 sparse weights on a GPU, multiplied by cuSPARSELt without their zeros."""

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
    """Return why the GPU cannot skip the zeros of weights in `dtype`, or None if it can."""
    if dtype not in DTYPES:
        return f"cuSPARSELt multiplies no weights in {str(dtype).removeprefix('torch.')}"
    if not torch.backends.cusparselt.is_available():
        return "this torch was built without cuSPARSELt, which multiplies 2:4 sparse weights"
    return None


def sparse_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a linear layer with a weight that the checkpoint calls 2:4 sparse.

    If the weight has more values, or cuSPARSELt does not support its sizes, it is multiplied as a dense weight.

    Args:
        weight: (outputs, inputs), zeros included.
        bias: (outputs,), or None.
    """
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
    """Return True if each four adjacent inputs of a weight (outputs, inputs) have at most two values that are not 0."""
    found = (weight.view(len(weight), -1, SPARSE_QUAD) != 0).sum(-1, dtype=torch.int8)
    return bool((found <= SPARSE_KEPT).all())


class SparseLinear(Linear):
    """A linear layer that stores only non-zero values and their positions, 9/16 of a weight's bytes.

    The rows of the input are padded to a multiple of SPARSE_SIZES.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compress the weight of a 2:4 sparse linear layer.

        Args:
            weight: (outputs, inputs) with a dtype of DTYPES, sizes that are multiples of SPARSE_SIZES, and 2:4
                sparsity.
            bias: (outputs,), or None.
        """
        self.out_features, self.in_features = weight.shape
        self._kept, self._bias = torch._cslt_compress(weight.contiguous()), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return the results (tokens, out_features) for x (tokens, in_features)."""
        rows = len(x)
        padded = pad(x, (0, 0, 0, -rows % SPARSE_SIZES)).contiguous()
        # cuSPARSELt multiplies the weight with columns, and transposes the result
        y = torch._cslt_sparse_mm(self._kept, padded.t(), bias=self._bias, transpose_result=True)
        return y[:rows]
