"""GPTQ as AutoGPTQ and GPTQModel write it (Frantar et al., 2023, "GPTQ"): codes of 2, 4 or 8 bits along the inputs,
with a scale and a zero for each group of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from batchinfer.core.errors import CannotSplit
from batchinfer.models.files.config_fields import shown
from batchinfer.models.formats.packed_tensor import (
    Codes,
    PackedTensor,
    PackedTensors,
    QweightFormat,
    Read,
    Slices,
    Span,
    Stored,
    StoredFormat,
    are_groups,
    cut_inputs,
    int4_form,
    is_float,
    words_of,
    wrong_group,
)
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

BITS = (2, 4, 8)  # codes of 3 bits lie across words
# Of the zeros, what their stored values lack: the first layout stored one less, which 0 cannot be
LAYOUTS = {"gptq": 1, "gptq_v2": 0}
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class GptqFormat(QweightFormat):
    """Weights of GPTQ. `group`: inputs that share a scale, None: all. `ordered`: which group an input is of is stored
    (`desc_act`). `added`: to stored zeros."""

    bits: int
    group: int | None
    ordered: bool
    added: int

    def _add(self, packed: PackedTensors, module: str, tensors: Stored) -> None:
        values, scales, zeros, groups = (module + end for end in ("qweight", "scales", "qzeros", "g_idx"))
        if packed.lacks(values, tensors, scales, zeros, *([groups] if self.ordered else [])):
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
        found = GptqTensor((outputs, inputs), stored, bits, self.group or inputs, self.ordered, self.added)
        packed.add(module + "weight", found, tensors, right)

    def _bits(self, tensors: Stored, values: str, groups: str) -> int:
        """Return the bits of a module's codes, which may have others than the rest (`dynamic` of GPTQModel)."""
        if groups not in tensors:
            return self.bits
        words, inputs = _matrix(tensors, values)[0], tensors[groups].info.shape
        fitting = (bits for bits in BITS if inputs == (words * WORD_BITS // bits,))
        return next(fitting, self.bits)


def _matrix(tensors: Stored, name: str) -> tuple[int, int]:
    """Return the shape of a tensor; (0, 0) if it is no matrix."""
    shape = tensors[name].info.shape
    return (shape[0], shape[1]) if len(shape) == 2 else (0, 0)


def gptq_format(stated: Mapping[str, Any], mistakes: list[str]) -> StoredFormat | None:
    """Return the format of `quant_method: gptq`."""
    bits, group = stated.get("bits"), stated.get("group_size", -1)
    layout = stated.get("checkpoint_format") or "gptq"
    wrong = []
    if not isinstance(bits, int) or bits not in BITS:
        wrong.append(f"bits is {shown(bits)}; wanted one of {BITS}")
    wrong += wrong_group(group)
    if layout not in LAYOUTS:
        wrong.append(f"checkpoint_format is {shown(layout)}; wanted one of {tuple(LAYOUTS)}")
    if stated.get("pack_dtype", "int32") != "int32":
        wrong.append(f"pack_dtype is {shown(stated['pack_dtype'])}; wanted 'int32'")
    mistakes += wrong
    if wrong:
        return None
    shared = None if group == -1 else group
    return GptqFormat(cast(int, bits), shared, stated.get("desc_act") is True, LAYOUTS[layout])


@dataclass(frozen=True, slots=True)
class GptqTensor(PackedTensor):
    """A matrix stored as codes (words of inputs, N), scales (groups, N), zeros (groups, words of outputs) and maybe the
    group of each input. `group` inputs share a scale; where it is `ordered`, those that the last tensor says."""

    format: ClassVar[str] = "gptq"

    bits: int
    group: int
    ordered: bool
    added: int

    @property
    def form(self) -> WeightForm | None:
        return None if self.bits != 4 or self.ordered else int4_form(self.group)

    def codes(self, read: Read, index: int | None = None) -> Codes:
        from batchinfer.models.formats.codes import int4_codes, unpacked

        values, scales, zeros = (read(name) for name in self.stored[:3])
        offsets = unpacked(zeros, self.bits)[:, : self.shape[0]].float() + self.added
        return int4_codes(unpacked(values.t(), self.bits), scales.t(), offsets.t())

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        if self.ordered and inputs != (0, self.shape[1]):
            raise CannotSplit(f"the groups of {self.format} weights follow no order that ranks could divide")
        held, columns = WORD_BITS // self.bits, slice(*outputs)
        group, groups, words = cut_inputs(inputs, self.shape[1], self.group, held)
        values, scales, zeros = self.stored[:3]
        slices = {values: (words, columns), scales: (groups, columns)}
        slices[zeros] = (groups, words_of(outputs, held, self.shape[0]))
        shape = (outputs[1] - outputs[0], inputs[1] - inputs[0])
        return replace(self, shape=shape, group=group), slices

    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        from batchinfer.models.formats.codes import in_order, scaled, unpacked

        values, scales, zeros = (read(name) for name in self.stored[:3])
        outputs, inputs = self.shape
        codes = unpacked(values.t(), self.bits).t()
        offsets = unpacked(zeros, self.bits)[:, :outputs].float() + self.added
        groups = None if inputs % self.group == 0 else in_order(inputs, self.group)
        if self.ordered:
            groups = read(self.stored[3])
        return scaled(codes, scales, offsets, groups).t()
