"""The base classes of quantised weights and of the formats of checkpoints. Does not import torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from batchinfer.core.errors import CannotSplit
from batchinfer.models.files.config_fields import shown
from batchinfer.models.files.weight_files import FLOAT_DTYPES, NAMED, StoredTensor
from batchinfer_kernels.arithmetic import WeightForm

if TYPE_CHECKING:
    from torch import Tensor

# Returns a stored tensor by name, as a view of the memory-mapped file
Read = Callable[[str], "Tensor"]
Shape = tuple[int, ...]
Stored = Mapping[str, StoredTensor]
Span = tuple[int, int]  # from the first to before the second
# For stored tensors by name, the slice of each dimension to read; tensors that are missing here are read whole
Slices = Mapping[str, tuple[slice, ...]]
ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The quantised values of a matrix (N outputs, K inputs), with scales.

    Args:
        values: int8 or float8_e4m3fn (N, K), with int4 as int8 from -8 to 7. In MXFP4, uint8 (N, K / 2), with the first
            of two values in the lower bits.
        scales: float32 (N,), or (N / high, groups). In MXFP4, exponents uint8 (N, K / 32).
        high: The number of outputs that share a row of scales.
        zeros: Numbers (N, groups) to subtract from the values before scaling, or None for 0.
    """

    values: Tensor
    scales: Tensor
    high: int = 1
    zeros: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedTensor(ABC):
    """A weight that a checkpoint stores in another form than a float tensor, such as values with scales.

    Attributes:
        format: The name of the form in messages.
        transposed: True if `codes` returns the transposes of the matrices that `dequantize` returns.
        plain: True if the only stored tensor is the weight itself.
        shape: The shape of the dequantised weight.
        stored: The names of the tensors that store the weight: values, scales and more.
    """

    format: ClassVar[str]
    transposed: ClassVar[bool] = False
    plain: ClassVar[bool] = False

    shape: Shape
    stored: tuple[str, ...]

    @property
    def matrices(self) -> bool:
        """Return True if the weight is a stack of matrices that can be read one at a time."""
        return False

    @property
    def quantized(self) -> bool:
        """Return True if storing the weight has rounded its values."""
        return True

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values, or None if they must be dequantised."""
        return None

    @abstractmethod
    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Return the weight, or one matrix of a stack, as float32. An unquantised weight may keep its dtype.

        Products of values and scales are exact or rounded once.

        Args:
            read: Returns a stored tensor by name.
            index: The number of a matrix in a stack, or None for the whole weight.
        """

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Return the quantised values and scales of the weight, or of one matrix of a stack.

        Args:
            read: Returns a stored tensor by name.
            index: The number of a matrix in a stack, or None for the whole weight.

        Raises:
            TypeError: If the weight has no `form`.
        """
        raise TypeError(f"weights of {self.format} have to be dequantised")

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        """Return the weight of a range of outputs and inputs, such as the shard of a rank.

        Args:
            outputs: The first output and the one after the last.
            inputs: The first input and the one after the last.
            index: The number of a matrix in a stack: the result is then a stack of this matrix alone. None for a weight
                without a stack.

        Returns:
            The weight, and for its stored tensors by name the slices to read. A tensor without slices is read whole.

        Raises:
            CannotSplit: If the border of a range divides a group or a word, or the format supports only whole weights.
        """
        raise CannotSplit(f"weights of {self.format} are read as a whole, and cannot be sharded among ranks")


@dataclass(slots=True)
class PackedTensors:
    """The quantised and sparse weights of a checkpoint.

    Attributes:
        found: The weights by name.
        unused: Names of stored tensors that are not needed, such as scales of activations.
        mistakes: Messages about tensors that are missing or do not fit.
        notices: Messages for the user.
    """

    found: dict[str, PackedTensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def stored(self) -> set[str]:
        """The names of all stored tensors that the found weights consist of."""
        return {name for each in self.found.values() for name in each.stored}

    @property
    def mistake_lines(self) -> Iterator[str]:
        """Yield the first messages of `mistakes`, and the number of further ones. Layers often repeat a mistake."""
        yield from self.mistakes[:NAMED]
        if more := len(self.mistakes[NAMED:]):
            yield f"{more} more quantised weights are as wrong"

    def add(self, name: str, packed: PackedTensor, tensors: Stored, fits: bool) -> None:
        """Add a weight, and a message if its stored tensors do not fit.

        A weight that does not fit is added too, since its tensors would otherwise also be reported as unexpected.

        Args:
            name: The name of the weight.
            packed: The weight.
            tensors: All tensors of the checkpoint.
            fits: True if dtypes and shapes of the stored tensors are as expected.
        """
        self.found[name] = packed
        if not fits:
            infos = [(each, tensors[each].info) for each in packed.stored]
            told = " and ".join(f"{each} {list(info.shape)} ({info.dtype})" for each, info in infos)
            self.mistakes.append(f"{told} are no weights of {packed.format} and their scales")

    def lacks(self, name: str, tensors: Stored, *needed: str) -> bool:
        """Return True, and add a message, if any of the tensors `needed` is missing from the checkpoint.

        Args:
            name: The quantised tensor that needs them, for the message.
            tensors: All tensors of the checkpoint.
            needed: Names of tensors.
        """
        missing = [each for each in needed if each not in tensors]
        if missing:
            self.mistakes.append(f"{name} is quantised, and its {' and '.join(missing)} are missing")
        return bool(missing)

    def unpacked_shapes(self, tensors: Stored) -> Iterator[tuple[str, Shape]]:
        """Yield (name, shape) of the checkpoint's tensors, with dequantised weights instead of stored tensors."""
        stored = self.stored
        yield from ((name, tensor.info.shape) for name, tensor in tensors.items() if name not in stored)
        yield from ((name, each.shape) for name, each in self.found.items())


class StoredFormat(ABC):
    """A quantisation format, as config.json states it. It finds the weights that are stored in this format."""

    @abstractmethod
    def find(self, tensors: Stored) -> PackedTensors:
        """Return the weights among a checkpoint's tensors that are stored in this format.

        Args:
            tensors: All tensors of the checkpoint by name.
        """


class QweightFormat(StoredFormat):
    """A format that stores a module's weight as tensors `qweight`, `scales` and `qzeros`."""

    def find(self, tensors: Stored) -> PackedTensors:
        """Return the weights of all modules that have a tensor `qweight`."""
        packed = PackedTensors()
        for name in tensors:
            if name.endswith(".qweight"):
                self._add(packed, name.removesuffix("qweight"), tensors)
        return packed

    @abstractmethod
    def _add(self, packed: PackedTensors, module: str, tensors: Stored) -> None:
        """Add the weight of a module to `packed`, or a message if its tensors do not fit. `module` ends with a dot."""


def wrong_group(group: object) -> list[str]:
    """Return a message if `group_size` of config.json is neither a positive integer nor -1; otherwise an empty list."""
    if type(group) is int and (group == -1 or group > 0):
        return []
    return [f"group_size is {shown(group)}; wanted a number above 0, or -1 for all inputs"]


def int4_form(group: int, whole_zeros: bool = True) -> WeightForm | None:
    """Return the form of int4 weights, or None if operators do not support groups of `group` inputs.

    Args:
        group: Number of inputs that share a scale.
        whole_zeros: True if zero points are integers.
    """
    fit = group > 0 and group % 8 == 0
    return WeightForm("int4", "group", stored=True, group=group, whole_zeros=whole_zeros) if fit else None


def slice_of(span: Span, unit: int, what: str) -> slice:
    """Return the slice of words or scales for a range of outputs or inputs.

    Args:
        span: The first value and the one after the last.
        unit: Number of values per word or scale.
        what: "outputs" or "inputs", for the message.

    Raises:
        CannotSplit: If the range does not begin and end at a multiple of `unit`.
    """
    first, end = span
    if first % unit or end % unit:
        raise CannotSplit(
            f"{first} to {end} of its {what} are no whole groups of {unit} that share a word or a scale"
        )
    return slice(first // unit, end // unit)


class InputCut(NamedTuple):
    """A range of a weight's inputs.

    Attributes:
        group: Number of inputs that share a scale.
        groups: The slice of the scales of these inputs.
        words: The slice of the words of these inputs.
    """

    group: int
    groups: slice
    words: slice


def cut_inputs(inputs: Span, count: int, group: int, held: int) -> InputCut:
    """Return the slices of scales and words for a range of inputs.

    Args:
        inputs: The first input and the one after the last.
        count: The number of all inputs. If they share one scale, the range has that scale.
        group: The number of inputs that share a scale.
        held: The number of inputs per word.

    Raises:
        CannotSplit: If the range would divide a group or a word.
    """
    one, whole = group >= count, inputs == (0, count)
    group = inputs[1] - inputs[0] if one else group
    groups = ALL if one or whole else slice_of(inputs, group, "inputs")
    return InputCut(group, groups, ALL if whole else slice_of(inputs, held, "inputs"))


def words_of(outputs: Span, held: int, count: int) -> slice:
    """Return the slice of words that hold the zero points of a range of outputs. The last word may not be full.

    Args:
        outputs: The first output and the one after the last.
        held: Number of zero points per word.
        count: The number of all outputs.

    Raises:
        CannotSplit: If the range would divide a word.
    """
    if outputs[1] < count:
        return slice_of(outputs, held, "outputs")
    return slice(slice_of((outputs[0], outputs[0]), held, "outputs").start, None)


def is_float(tensor: StoredTensor) -> bool:
    """Return True if a tensor has a float dtype that scales may have."""
    return tensor.info.dtype in FLOAT_DTYPES


def are_groups(tensors: Stored, name: str, inputs: int, number: int) -> bool:
    """Return True if a tensor is int32 (inputs,) and holds a group from 0 to number - 1 for each input.

    Args:
        tensors: All tensors of the checkpoint.
        name: The name of the tensor.
        inputs: Number of inputs.
        number: Number of groups.
    """
    found = tensors[name]
    if found.info.dtype != "I32" or found.info.shape != (inputs,):
        return False
    groups = found.integers()
    return not len(groups) or (int(groups.min()) >= 0 and int(groups.max()) < number)
