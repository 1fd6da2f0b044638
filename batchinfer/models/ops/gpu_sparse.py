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
    """Return the reason why the GPU cannot multiply 2:4 sparse weights of a dtype; None if it can."""
    if dtype not in DTYPES:
        return f"cuSPARSELt multiplies no weights in {str(dtype).removeprefix('torch.')}"
    if not torch.backends.cusparselt.is_available():
        return "this torch was built without cuSPARSELt, which multiplies 2:4 sparse weights"
    return None


def sparse_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return a linear layer with a weight that is 2:4 sparse according to the checkpoint.

    If the weight is not 2:4 sparse, or cuSPARSELt does not support its sizes, it is multiplied as a dense weight.

    Args:
        weight: (outputs, inputs), zeros included.
        bias: (outputs,). None: there is none.
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
    """Return True if a weight is 2:4 sparse: each group of four adjacent inputs has at most two values that are not 0.

    Args:
        weight: (outputs, inputs).
    """
    found = (weight.view(len(weight), -1, SPARSE_QUAD) != 0).sum(-1, dtype=torch.int8)
    return bool((found <= SPARSE_KEPT).all())


class SparseLinear(Linear):
    """A linear layer that stores only the non-zero values of a 2:4 sparse weight and their positions.

    They take 9/16 of the bytes of the dense weight.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Compress the weight.

        Args:
            weight: (outputs, inputs). It must be 2:4 sparse, in a dtype of DTYPES, with sizes that are multiples of
                SPARSE_SIZES.
            bias: (outputs,). None: there is none.
        """
        self.out_features, self.in_features = weight.shape
        self._kept, self._bias = torch._cslt_compress(weight.contiguous()), bias

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x, (tokens, in_features), and return (tokens, out_features)."""
        rows = len(x)
        padded = pad(x, (0, 0, 0, -rows % SPARSE_SIZES)).contiguous()
        # cuSPARSELt multiplies the weight with columns, and transposes the result
        y = torch._cslt_sparse_mm(self._kept, padded.t(), bias=self._bias, transpose_result=True)
        return y[:rows]
