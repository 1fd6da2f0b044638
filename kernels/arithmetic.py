"""The names of devices, dtypes and quantised formats that an engine can use. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
# One-byte formats of a quantised KV cache; fp8: float8_e4m3fn. See batchinfer_kernels.rope_store
CacheDtype = Literal["int8", "fp8"]
KvCacheDtype = Literal["auto", CacheDtype]  # auto: the dtype of the run, not quantised
# Quantisation of the linear layers that a job can set; stored: keep the quantised values of the checkpoint
RequestedQuantization = Literal["auto", "none", "int4", "int8", "fp8", "stored"]
# Quantisation of the linear layers as loaded; "stored" without a suffix: fp8 values of the checkpoint
Quantization = Literal[
    "none", "int4", "int8", "fp8", "stored", "stored-int8", "stored-int4", "stored-mxfp4", "stored-sparse"
]
STORED: Mapping[WeightCodes, Quantization] = {
    "fp8": "stored",
    "int8": "stored-int8",
    "int4": "stored-int4",
    "mxfp4": "stored-mxfp4",
    "sparse": "stored-sparse",
}  # by the format of the checkpoint
# Formats of a weight's values. fp8: float8_e4m3fn; mxfp4: 4-bit floats, 32 inputs share a power of two; sparse: values
# in the run's dtype, two of each four inputs are zero
WeightCodes = Literal["int4", "int8", "fp8", "mxfp4", "sparse"]
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]  # see batchinfer_kernels.gated_activation
SCALE_BYTES = 4  # a float32 scale
SPARSE_QUAD, SPARSE_KEPT = 4, 2  # of each 4 inputs of a sparse weight, 2 have a value
SPARSE_SIZES = 16  # a GPU skips the zeros only if outputs and inputs are multiples of this


@dataclass(frozen=True, slots=True)
class WeightForm:
    """The memory format of a quantised or sparse weight.

    Attributes:
        codes: format of a stored value, such as "int8".
        scales: which values share a scale: all inputs of an output ("channel"), a block of outputs and inputs
            ("block"), or `group` inputs of an output ("group").
        stored: True if the checkpoint holds the values in this format; False if they are quantised when loaded.
        group: number of inputs that share a scale, for `scales` "group".
        whole_zeros: True if zero points, if any, are integers.
    """

    codes: WeightCodes
    scales: Literal["channel", "block", "group"] = "channel"
    stored: bool = False
    group: int = 0
    whole_zeros: bool = True

    @property
    def coded(self) -> bool:
        """Return True if the weight is quantised; False for a sparse weight."""
        return self.codes != "sparse"

    @property
    def hadamard(self) -> bool:
        """Return True if inputs are transformed before they are quantised; see batchinfer_kernels.quantized_linear."""
        return self.codes == "int8" and not self.stored

    def value_bytes(self, itemsize: int) -> float:
        """Return the bytes that the weight takes per value of the unpacked matrix.

        The scales of groups are counted, the scales of outputs and blocks are not. A sparse weight stores half of the
        values, with two bits for the position of each.

        Args:
            itemsize: bytes per value that is not quantised.
        """
        if self.codes == "sparse":
            return itemsize / 2 + 1 / 8
        if self.codes == "mxfp4":  # the scale is a one-byte exponent
            return 0.5 + 1 / self.group
        return 0.5 + SCALE_BYTES / self.group if self.codes == "int4" else 1.0


NO_TOKEN = -1  # the token id of a row whose greatest logit is not finite
# Constants of the clamped SwiGLU of gpt-oss (OpenAI, 2025); see batchinfer_kernels.gated_activation
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
