"""GPTQ checkpoints as AutoGPTQ and GPTQModel write them (Frantar et al., 2023, "GPTQ").

A word holds values of 2, 4 or 8 bits of consecutive inputs. Each group of inputs has a scale and a zero point per
output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from batchinfer.core.errors import CannotSplit
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
    are_groups,
    int4_form,
    is_float,
    slice_inputs,
    words_of,
    wrong_group,
)
from batchinfer.models.formats.zero_layout import FIRST, LAYOUTS, WORD_BITS, ZeroLayout
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 4, 8)  # 3-bit values, which cross the borders of words, are unsupported


@dataclass(frozen=True, slots=True)
class GptqFormat(QweightFormat):
    """The format of GPTQ checkpoints, which finds their quantised weights.

    Attributes:
        bits: Bits of a value in modules whose tensors do not show another number.
        group: Number of inputs that share a scale. None: all inputs of an output.
        ordered: True if tensors `g_idx` store the group of each input (`desc_act`). Otherwise, groups are consecutive
            inputs.
        zeros: The layout of the zero points in `qzeros`.
    """

    bits: int
    group: int | None
    ordered: bool
    zeros: ZeroLayout

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the quantised weights among a checkpoint's tensors.

        The first tensor named `qzeros` shows how all zero points of the checkpoint are stored.
        """
        first = next((name for name in tensors if name.endswith(".qzeros")), None)
        if first is None:
            return QweightFormat.find(self, tensors)
        module = first.removesuffix("qzeros")
        bits = self._bits(tensors, module + "qweight", module + "g_idx")
        layout = self.zeros.detect(tensors[first], bits)
        encoded = QweightFormat.find(replace(self, zeros=layout), tensors)
        encoded.notices += layout.notices
        return encoded

    def _add(self, encoded: EncodedTensors, module: str, tensors: Stored) -> None:
        values, scales, zeros, groups = (module + end for end in ("qweight", "scales", "qzeros", "g_idx"))
        if encoded.lacks(values, tensors, scales, zeros, *([groups] if self.ordered else [])):
            return
        bits = self._bits(tensors, values, groups)
        held = WORD_BITS // bits
        (words, outputs), lines = _matrix(tensors, values), _matrix(tensors, scales)
        inputs = words * held
        number = -(-inputs // (self.group or inputs)) if inputs else 0
        right = tensors[values].info.dtype == tensors[zeros].info.dtype == "I32" and is_float(tensors[scales])
        right = (
            right and lines == (number, outputs) and _matrix(tensors, zeros) == (number, -(-outputs // held))
        )
        stored: tuple[str, ...] = (values, scales, zeros)
        if groups in tensors:
            right = right and are_groups(tensors, groups, inputs, number)
            stored = (*stored, groups)
        found = GptqTensor((outputs, inputs), stored, bits, self.group or inputs, self.ordered, self.zeros)
        encoded.add(module + "weight", found, tensors, right)

    def _bits(self, tensors: Stored, values: str, groups: str) -> int:
        if groups not in tensors or values not in tensors:
            return self.bits
        words, inputs = _matrix(tensors, values)[0], tensors[groups].info.shape
        fitting = (bits for bits in BITS if inputs == (words * WORD_BITS // bits,))
        return next(fitting, self.bits)


def _matrix(tensors: Stored, name: str) -> tuple[int, int]:
    shape = tensors[name].info.shape
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def gptq_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Parse a `quantization_config` with `quant_method: gptq`.

    Args:
        stated: The `quantization_config` of config.json.
        mistakes: Receives a message about each unsupported value.

    Returns:
        The format; None if a value is unsupported.
    """
    bits, group = stated.get("bits"), stated.get("group_size", -1)
    layout = stated.get("checkpoint_format")
    layout = FIRST if layout is None else layout
    wrong = []
    if not isinstance(bits, int) or bits not in BITS:
        wrong.append(f"bits is {shown(bits)}; wanted one of {BITS}")
    wrong += wrong_group(group)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        wrong.append(f"checkpoint_format is {shown(layout)}; wanted one of {tuple(LAYOUTS)}")
    if stated.get("pack_dtype", "int32") != "int32":
        wrong.append(f"pack_dtype is {shown(stated['pack_dtype'])}; wanted 'int32'")
    for key in ("desc_act", "sym"):
        if not isinstance(stated.get(key), bool | None):
            wrong.append(f"{key} is {shown(stated[key])}; wanted true or false")
    mistakes += wrong
    if wrong:
        return None
    shared, ordered = None if group == -1 else group, stated.get("desc_act") is True
    zeros = ZeroLayout(layout, layout, symmetric=_is_symmetric(stated))
    return GptqFormat(cast(int, bits), shared, ordered, zeros)


def _is_symmetric(stated: Mapping[str, Any]) -> bool:
    dynamic = stated.get("dynamic")
    overrides = dynamic.values() if isinstance(dynamic, Mapping) else ()
    return stated.get("sym") is True and not any(
        isinstance(each, Mapping) and each.get("sym") is not None for each in overrides
    )


@dataclass(frozen=True, slots=True)
class GptqTensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) that is stored in the layout of GPTQ.

    These tensors store it: int32 words of values (words of inputs, N), scales (groups, N), words of zero points
    (groups, words of outputs), and optionally the group of each input (K,).

    Attributes:
        bits: Bits of a value.
        group: Number of inputs that share a scale.
        ordered: True if the last stored tensor has the group of each input. Otherwise, groups are consecutive inputs.
        zeros: The layout of the zero points.
    """

    format: ClassVar[str] = "gptq"

    bits: int
    group: int
    ordered: bool
    zeros: ZeroLayout

    @property
    def stored_zeros(self) -> str:
        """Return the name of the tensor that stores the zero points."""
        return self.stored[2]

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int4 in groups.

        Returns None if they must be dequantised, as with other than 4 bits or with ordered groups.
        """
        return None if self.bits != 4 or self.ordered else int4_form(self.group)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, int8 from -8 to 7, with their scales and zero points.

        Values are (outputs, inputs), scales and zero points (outputs, groups). The weight must have 4 bits.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import int4_codes, unpack_words

        values, scales, zeros = (read(name) for name in self.stored[:3])
        offsets = self._zero_points(zeros).t()
        return int4_codes(unpack_words(values.t(), self.bits), scales.t(), offsets)

    def _zero_points(self, words: Tensor) -> Tensor:
        from batchinfer.models.formats.codes import unpack_words

        # A packer subtracts from whole words, and a 0 borrows from the next value. The carry undoes the borrow.
        restored = words + self.zeros.subtracted(self.bits)
        return unpack_words(restored, self.bits)[:, : self.shape[0]]

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: Not used, as the weight is not a stack of matrices.

        Raises:
            CannotSplit: A range begins or ends within a word or a group that shares a scale.
        """
        if self.ordered and inputs != (0, self.shape[1]):
            raise CannotSplit(f"the groups of {self.format} weights follow no order that ranks could divide")
        held, columns = WORD_BITS // self.bits, slice(*outputs)
        group, groups, words = slice_inputs(inputs, self.shape[1], self.group, held)
        values, scales, zeros = self.stored[:3]
        slices = {values: (words, columns), scales: (groups, columns)}
        slices[zeros] = (groups, words_of(outputs, held, self.shape[0]))
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape, group=group), slices

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): (value - zero point) * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import apply_scales, consecutive_groups, unpack_words

        values, scales, zeros = (read(name) for name in self.stored[:3])
        inputs = self.shape[1]
        codes = unpack_words(values.t(), self.bits).t()
        groups = None if inputs % self.group == 0 else consecutive_groups(inputs, self.group)
        if self.ordered:
            groups = read(self.stored[3])
        return apply_scales(codes, scales, self._zero_points(zeros), groups).t()
