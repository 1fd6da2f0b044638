"""AWQ checkpoints in AutoAWQ's `gemm` layout (Lin et al., 2024, "AWQ").

A word holds the 4-bit values of eight outputs. Each group of inputs has a scale and a zero point per output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.encoded_tensor import (
    Codes,
    EncodedTensor,
    EncodedTensors,
    QweightFormat,
    Read,
    Slices,
    Span,
    Stored,
    StoredFormat,
    int4_form,
    is_float,
    slice_inputs,
    slice_of,
    wrong_group,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

BITS, HELD = 4, 8  # bits of a value, and values per word
# For each of the eight outputs of a word, the position of its value
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqFormat(QweightFormat):
    """The format of AWQ checkpoints, which finds their quantised weights.

    Attributes:
        group: Number of inputs that share a scale. None: all inputs of an output.
    """

    group: int | None

    def _add(self, encoded: EncodedTensors, module: str, tensors: Stored) -> None:
        stored = values, scales, zeros = module + "qweight", module + "scales", module + "qzeros"
        if encoded.lacks(values, tensors, scales, zeros):
            return
        shape = tensors[values].info.shape
        inputs, words = shape if len(shape) == 2 else (0, 0)
        group = self.group or max(1, inputs)
        lines = inputs // group
        right = tensors[values].info.dtype == tensors[zeros].info.dtype == "I32" and is_float(tensors[scales])
        right = right and inputs % group == 0 and tensors[zeros].info.shape == (lines, words)
        right = right and tensors[scales].info.shape == (lines, words * HELD)
        encoded.add(module + "weight", AwqTensor((words * HELD, inputs), stored, group), tensors, right)


def awq_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: awq`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message about each unsupported value.

    Returns:
        The format; None if a value is unsupported.
    """
    bits, version = stated.get("bits", stated.get("w_bit")), stated.get("version", "gemm")
    group = stated.get("group_size", stated.get("q_group_size", -1))
    wrong = []
    if bits != BITS:
        wrong.append(f"bits is {shown(bits)}; wanted {BITS}")
    if not isinstance(version, str) or version.lower() != "gemm":
        wrong.append(f"version is {shown(version)}; wanted 'gemm'")
    wrong += wrong_group(group)
    mistakes += wrong
    return None if wrong else AwqFormat(None if group == -1 else group)


@dataclass(frozen=True, slots=True)
class AwqTensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) that is stored in AutoAWQ's layout.

    Three tensors store it: int32 words of 4-bit values (K, N / 8), scales (groups, N), and words of zero points
    (groups, N / 8).

    Attributes:
        group: Number of inputs that share a scale.
    """

    format: ClassVar[str] = "awq"

    group: int

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int4 in groups.

        Returns None if they must be dequantised.
        """
        return int4_form(self.group)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, int8 from -8 to 7, with their scales and zero points.

        Values are (outputs, inputs), scales and zero points (outputs, groups).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import int4_codes, unpack_words

        values, scales, zeros = map(read, self.stored)
        return int4_codes(
            unpack_words(values, BITS, ORDER).t(), scales.t(), unpack_words(zeros, BITS, ORDER).t()
        )

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: Not used, as the weight is not a stack of matrices.

        Raises:
            CannotSplit: A range begins or ends within a word or a group that shares a scale.
        """
        values, scales, zeros = self.stored
        words, columns = slice_of(outputs, HELD, "outputs"), slice(*outputs)
        group, groups, lines = slice_inputs(inputs, self.shape[1], self.group, 1)
        slices = {values: (lines, words), scales: (groups, columns), zeros: (groups, words)}
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape, group=group), slices

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): (value - zero point) * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import apply_scales, unpack_words

        values, scales, zeros = map(read, self.stored)
        return apply_scales(unpack_words(values, BITS, ORDER), scales, unpack_words(zeros, BITS, ORDER)).t()
