"""Integer weights of compressed-tensors checkpoints: 4-bit or 8-bit values packed in words, or plain int8."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from batchinfer.core.errors import CannotSplit
from batchinfer.models.formats.encoded_tensor import (
    ALL,
    Codes,
    EncodedTensor,
    EncodedTensors,
    Read,
    Shape,
    Slices,
    Span,
    Stored,
    are_groups,
    int4_form,
    is_float,
    slice_inputs,
    slice_of,
    words_of,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32


def add_packed_integers(
    encoded: EncodedTensors, module: str, tensors: Stored, among: Collection[int]
) -> None:
    """Add a weight that is stored as words of integers to `encoded`. If its tensors do not fit, add an error message.

    Args:
        encoded: The quantised weights of the checkpoint that were found so far.
        module: The module's name, with a dot at its end.
        tensors: All tensors of the checkpoint.
        among: The possible numbers of bits of a value. The shapes of tensors show which one applies.
    """
    values, scales, shape = (module + end for end in ("weight_packed", "weight_scale", "weight_shape"))
    zeros, groups = module + "weight_zero_point", module + "weight_g_idx"
    if encoded.lacks(values, tensors, scales, shape):
        return
    outputs, inputs = _stated_shape(tensors, shape)
    rows = tensors[values].info.shape
    fitting = (bits for bits in among if rows == (outputs, -(-inputs * bits // WORD_BITS)))
    bits = next(fitting, 0)
    lines = tensors[scales].info.shape
    right = bits > 0 and is_float(tensors[scales]) and _fit(lines, outputs, inputs)
    number = lines[1] if right and len(lines) == 2 else 1
    stored = [values, scales, shape]
    if zeros in tensors:
        info = tensors[zeros].info
        right = right and (info.dtype, info.shape) == ("I32", (-(-outputs * bits // WORD_BITS), number))
        stored.append(zeros)
    if groups in tensors:
        right = right and are_groups(tensors, groups, inputs, number)
        stored.append(groups)
    found = PackedIntegers(
        (outputs, inputs),
        tuple(stored),
        bits,
        zeros=zeros in tensors,
        ordered=groups in tensors,
        group=inputs // number if number else 0,
    )
    encoded.add(module + "weight", found, tensors, right)


def _stated_shape(tensors: Stored, name: str) -> tuple[int, int]:
    info = tensors[name].info
    if info.shape != (2,) or info.dtype not in ("I64", "I32"):
        return 0, 0
    outputs, inputs = tensors[name].integers().tolist()
    return (outputs, inputs) if outputs > 0 and inputs > 0 else (0, 0)


def _fit(scales: Shape, outputs: int, inputs: int) -> bool:
    if scales in ((1,), (), (outputs,)):
        return True
    return len(scales) == 2 and scales[0] == outputs and scales[1] > 0 and inputs % scales[1] == 0


@dataclass(frozen=True, slots=True)
class PackedIntegers(EncodedTensor):
    """A weight matrix (N outputs, K inputs) that compressed-tensors stores as integers in int32 words.

    These tensors store it: words of values (N, words of inputs), scales (N, groups), the shape, and optionally words of
    zero points (words of outputs, groups) and the group of each input (K,). Values and zero points are stored with
    2^(bits - 1) added.

    Attributes:
        bits: Bits of a value, 4 or 8.
        zeros: True if zero points are stored.
        ordered: True if the last stored tensor has the group of each input. Otherwise, groups are consecutive inputs.
        group: Number of inputs that share a scale.
    """

    format: ClassVar[str] = "pack-quantized"

    bits: int
    zeros: bool
    ordered: bool
    group: int

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

        values, scales, *_ = map(read, self.stored)
        outputs, inputs = self.shape
        found = None
        if self.zeros:
            found = unpack_words(read(self.stored[3]).t(), self.bits)[:, :outputs].t()
        codes = unpack_words(values, self.bits)[:, :inputs]
        return int4_codes(codes, _lines(scales, outputs).t(), found)

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
        held, rows = WORD_BITS // self.bits, slice(*outputs)
        group, groups, words = slice_inputs(inputs, self.shape[1], self.group, held)
        slices = {self.stored[0]: (rows, words), self.stored[1]: (rows, groups)}
        if self.zeros:
            slices[self.stored[3]] = (words_of(outputs, held, self.shape[0]), groups)
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape, group=group), slices

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): (value - zero point) * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import apply_scales, unpack_words

        values, scales, *_ = map(read, self.stored)
        outputs, inputs = self.shape
        codes = unpack_words(values, self.bits)[:, :inputs]
        lines = _lines(scales, outputs)
        least = 2 ** (self.bits - 1)
        if self.zeros:  # like the values, zero points are stored with 2^(bits - 1) added
            offsets = unpack_words(read(self.stored[3]).t(), self.bits)[:, :outputs]
        else:
            offsets = lines.new_full(lines.shape, least)
        groups = read(self.stored[-1]) if self.ordered else None
        return apply_scales(codes.t(), lines, offsets, groups).t()


def _lines(scales: Tensor, outputs: int) -> Tensor:
    return scales.expand(outputs, 1).t() if scales.numel() == 1 else scales.reshape(outputs, -1).t()


def add_int8(encoded: EncodedTensors, name: str, tensors: Stored, alone: bool) -> None:
    """Add a weight that is stored as int8 to `encoded`. If its scales or zero points do not fit, add an error message.

    Args:
        encoded: The quantised weights of the checkpoint that were found so far.
        name: The name of the tensor with the values; its scales are `name` + "_scale".
        tensors: All tensors of the checkpoint.
        alone: True if the weight must be multiplied with unquantised activations.
    """
    scales, zeros = name + "_scale", name + "_zero_point"
    if encoded.lacks(name, tensors, scales):
        return
    shape, lines = tensors[name].info.shape, tensors[scales].info
    right = len(shape) == 2 and is_float(tensors[scales]) and _fit(lines.shape, *shape)
    stored: tuple[str, ...] = (name, scales)
    if zeros in tensors:
        right = right and tensors[zeros].info.dtype == "I8" and tensors[zeros].info.shape == lines.shape
        stored = (*stored, zeros)
    encoded.add(name, Int8Tensor(shape, stored, lines.shape, alone), tensors, right)
    module = name.removesuffix("weight")
    activations = (module + end for end in ("input_scale", "input_zero_point"))
    encoded.unused.update(each for each in activations if each in tensors)


@dataclass(frozen=True, slots=True)
class Int8Tensor(EncodedTensor):
    """A weight matrix (N outputs, K inputs) stored as int8, with scales and optionally zero points (N, groups).

    Attributes:
        scales: The shape of the tensor with the scales.
        alone: True if the weight must be multiplied with unquantised activations.
    """

    format: ClassVar[str] = "int8"

    scales: Shape
    alone: bool

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values: int8 with a scale per output.

        Returns None if they must be dequantised. This also holds if there are zero points, or if activations must not
        be quantised.
        """
        by_channel = self.scales in ((self.shape[0],), (self.shape[0], 1))
        if self.alone or not by_channel or len(self.stored) > 2:
            return None
        return WeightForm("int8", stored=True)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, int8 (outputs, inputs), and their scales (outputs,).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        values, scales = map(read, self.stored)
        return Codes(values, scales.float().reshape(-1))

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: Not used, as the weight is not a stack of matrices.

        Raises:
            CannotSplit: A range begins or ends within a word or a group that shares a scale.
        """
        rows, shape = slice(*outputs), (outputs[1] - outputs[0], inputs[1] - inputs[0])
        if math.prod(self.scales) == 1:
            return replace(self, shape=shape), {self.stored[0]: (rows, slice(*inputs))}
        number = self.scales[1] if len(self.scales) > 1 else 1
        groups = ALL if number == 1 else slice_of(inputs, self.shape[1] // number, "inputs")
        held = number if groups == ALL else groups.stop - groups.start
        lines = dict.fromkeys(self.stored[1:], (rows, groups))
        scales = (shape[0], held)[: len(self.scales)]
        return replace(self, shape=shape, scales=scales), {self.stored[0]: (rows, slice(*inputs)), **lines}

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the weight and dequantise it to float32 (outputs, inputs): (value - zero point) * scale.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        from batchinfer.models.formats.codes import apply_scales

        values, scales, *zeros = map(read, self.stored)
        lines = _lines(scales, self.shape[0])
        return apply_scales(values.t(), lines, _lines(zeros[0], self.shape[0]) if zeros else None).t()
