"""The names of the devices and arithmetics that an engine can be asked for. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
# Of the codes of a byte that a KV cache may keep in place of values; fp8: float8_e4m3fn. See
# batchinfer_kernels.rope_store
CacheDtype = Literal["int8", "fp8"]
KvCacheDtype = Literal["auto", CacheDtype]  # auto: values in the dtype of the run
# Of the linear layers' weights, as a job may ask for them; stored: quantised values stay as the checkpoint has them
AskedQuantization = Literal["auto", "none", "int4", "int8", "fp8", "stored"]
# As they are loaded; stored: in fp8
Quantization = Literal[
    "none", "int4", "int8", "fp8", "stored", "stored-int8", "stored-int4", "stored-mxfp4", "stored-sparse"
]
STORED: Mapping[WeightCodes, Quantization] = {
    "fp8": "stored",
    "int8": "stored-int8",
    "int4": "stored-int4",
    "mxfp4": "stored-mxfp4",
    "sparse": "stored-sparse",
}  # by what a checkpoint holds
# Of a weight's quantised values; fp8: float8_e4m3fn; mxfp4: of 4 bits, of which 32 inputs share a power of two. sparse:
# values of the run's dtype, of which each four inputs have two, and zeros
WeightCodes = Literal["int4", "int8", "fp8", "mxfp4", "sparse"]
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]  # see batchinfer_kernels.gated_activation
SCALE_BYTES = 4  # of float32
SPARSE_QUAD, SPARSE_KEPT = 4, 2  # inputs of a sparse weight, and how many of them have a value
SPARSE_SIZES = 16  # of which its outputs and inputs are multiples where a GPU's products leave out its zeros


@dataclass(frozen=True, slots=True)
class WeightForm:
    """How a weight lies in memory whose values are quantised: as `codes`, with a scale for each output, for each block
    of outputs and inputs, or for each output and `group` of inputs. `stored`: the checkpoint holds them so; else they
    are made when it is loaded. `whole_zeros`: any zeros are integers, and not values between codes."""

    codes: WeightCodes
    scales: Literal["channel", "block", "group"] = "channel"
    stored: bool = False
    group: int = 0
    whole_zeros: bool = True

    @property
    def coded(self) -> bool:
        """Whether its values are quantised."""
        return self.codes != "sparse"

    def value_bytes(self, itemsize: int) -> float:
        """Return the bytes that a value takes, with its part of the scales of groups; `itemsize`: of one that is not
        quantised. Of those of which every other one is zero, two bits say where the other ones stand."""
        if self.codes == "sparse":
            return itemsize / 2 + 1 / 8
        if self.codes == "mxfp4":  # a scale is an exponent of a byte
            return 0.5 + 1 / self.group
        return 0.5 + SCALE_BYTES / self.group if self.codes == "int4" else 1.0


NO_TOKEN = -1  # in place of a token where a row's logits are not numbers
# Of the clamped SwiGLU of gpt-oss (OpenAI, 2025); see batchinfer_kernels.gated_activation
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
