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
        values: int8 or float8_e4m3fn (N, K); int4 values are int8 from -8 to 7. In MXFP4, uint8 (N, K / 2): two values
            per byte, the first in the lower bits.
        scales: float32 (N,), or (N / high, groups) with groups of consecutive inputs. In MXFP4, exponents of scales,
            uint8 (N, K / 32).
        high: The number of outputs that share a row of scales.
        zeros: (N, groups), zero points, which are subtracted from the values before scaling. None: they are 0.
    """

    values: Tensor
    scales: Tensor
    high: int = 1
    zeros: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EncodedTensor(ABC):
    """A weight that a checkpoint stores in another form than a float tensor, such as values with scales.

    Attributes:
        format: The name of the storage format in messages.
        transposed: True if `codes` returns the transposes of the matrices that `dequantize` returns.
        plain: True if the weight is a 2:4 sparse one that is stored as an ordinary float tensor.
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
        """Return True if the stored values are rounded to a quantised type, False if they are floats."""
        return True

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the stored values. None: they must be dequantised on loading."""
        return None

    @abstractmethod
    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Return the weight, or one matrix of a stack, as float32. An unquantised weight may keep its dtype.

        Products of values and scales are exact or rounded once.

        Args:
            read: Returns a stored tensor by name.
            index: The number of a matrix, if the weight is a stack of matrices. None: the whole weight.
        """

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Return the quantised values and scales of the weight, or of one matrix of a stack.

        Args:
            read: Returns a stored tensor by name.
            index: The number of a matrix, if the weight is a stack of matrices. None: the whole weight.

        Raises:
            TypeError: `form` is None: the weight must be dequantised.
        """
        raise TypeError(f"weights of {self.format} have to be dequantised")

    def slice(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[EncodedTensor, Slices]:
        """Return this weight for a range of outputs and inputs, and the slices of its stored tensors that must be read.

        Args:
            outputs: First output, and end (exclusive).
            inputs: First input, and end (exclusive).
            index: The number of a matrix, if the weight is a stack of matrices. The result is then a stack of this
                matrix alone. None: the weight is a single matrix.

        Returns:
            The weight, and slices by name of the stored tensor. A tensor without an entry is read whole.

        Raises:
            CannotSplit: A range begins or ends within a group or a word, or the format supports only whole weights.
        """
        raise CannotSplit(f"weights of {self.format} are read as a whole, and cannot be sharded among ranks")


@dataclass(slots=True)
class EncodedTensors:
    """The quantised and sparse weights that were found in a checkpoint.

    Attributes:
        found: The weights by name.
        unused: Names of stored tensors that are not needed, such as scales of activations.
        mistakes: Error messages about tensors that are missing or do not fit.
        notices: Notices for the user that are not errors.
    """

    found: dict[str, EncodedTensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def stored(self) -> set[str]:
        """Return the names of all tensors that store the weights in `found`, such as values and scales."""
        return {name for each in self.found.values() for name in each.stored}

    @property
    def mistake_lines(self) -> Iterator[str]:
        """Yield the first NAMED messages of `mistakes`, and then a message with the number of the others."""
        yield from self.mistakes[:NAMED]
        if more := len(self.mistakes[NAMED:]):
            yield f"{more} more quantised weights are as wrong"

    def add(self, name: str, encoded: EncodedTensor, tensors: Stored, fits: bool) -> None:
        """Add a weight to `found`. If its stored tensors do not fit, also add an error message to `mistakes`.

        Args:
            name: The name of the weight.
            encoded: The weight.
            tensors: All tensors of the checkpoint.
            fits: True if dtypes and shapes of the stored tensors are as expected.
        """
        self.found[name] = encoded
        if not fits:
            infos = [(each, tensors[each].info) for each in encoded.stored]
            told = " and ".join(f"{each} {list(info.shape)} ({info.dtype})" for each, info in infos)
            self.mistakes.append(f"{told} are no weights of {encoded.format} and their scales")

    def lacks(self, name: str, tensors: Stored, *needed: str) -> bool:
        """Return True, and add an error message, if any of the tensors `needed` is missing from the checkpoint.

        Args:
            name: The quantised tensor that needs the other tensors, for the message.
            tensors: All tensors of the checkpoint.
            needed: Names of tensors.
        """
        missing = [each for each in needed if each not in tensors]
        if missing:
            self.mistakes.append(f"{name} is quantised, and its {' and '.join(missing)} are missing")
        return bool(missing)

    def decoded_shapes(self, tensors: Stored) -> Iterator[tuple[str, Shape]]:
        """Yield name and shape of each tensor that the checkpoint would have if all its weights were stored as floats.

        Args:
            tensors: All stored tensors of the checkpoint by name.
        """
        stored = self.stored
        yield from ((name, tensor.info.shape) for name, tensor in tensors.items() if name not in stored)
        yield from ((name, each.shape) for name, each in self.found.items())


class StoredFormat(ABC):
    """A quantisation format that config.json names. It finds the weights that are stored in this format."""

    @abstractmethod
    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the weights among a checkpoint's tensors that are stored in this format.

        Args:
            tensors: All tensors of the checkpoint by name.
        """


class QweightFormat(StoredFormat):
    """A format that stores each quantised weight as tensors `qweight`, `scales` and `qzeros` (AWQ, GPTQ)."""

    def find(self, tensors: Stored) -> EncodedTensors:
        """Return the quantised weights of all modules that have a tensor `qweight`."""
        encoded = EncodedTensors()
        for name in tensors:
            if name.endswith(".qweight"):
                self._add(encoded, name.removesuffix("qweight"), tensors)
        return encoded

    @abstractmethod
    def _add(self, encoded: EncodedTensors, module: str, tensors: Stored) -> None: ...


def wrong_group(group: object) -> list[str]:
    """Return an error message if `group_size` of config.json is neither a positive integer nor -1.

    Returns [] if it is valid.
    """
    if type(group) is int and (group == -1 or group > 0):
        return []
    return [f"group_size is {shown(group)}; wanted a number above 0, or -1 for all inputs"]


def int4_form(group: int, whole_zeros: bool = True) -> WeightForm | None:
    """Return the form in which operators use int4 weights; None if they do not support groups of this size.

    Args:
        group: Number of inputs that share a scale.
        whole_zeros: True if zero points are integers.
    """
    fit = group > 0 and group % 8 == 0
    return WeightForm("int4", "group", stored=True, group=group, whole_zeros=whole_zeros) if fit else None


def slice_of(span: Span, unit: int, what: str) -> slice:
    """Return the slice of words or scales that belong to a range of outputs or inputs.

    Args:
        span: First output or input, and end (exclusive).
        unit: Number of outputs or inputs per word or scale.
        what: "outputs" or "inputs", for the error message.

    Raises:
        CannotSplit: The range does not begin and end at a multiple of `unit`.
    """
    first, end = span
    if first % unit or end % unit:
        raise CannotSplit(
            f"{first} to {end} of its {what} are no whole groups of {unit} that share a word or a scale"
        )
    return slice(first // unit, end // unit)


class InputSlices(NamedTuple):
    """The parts of a weight's stored tensors that belong to a range of its inputs.

    Attributes:
        group: Number of inputs in the range that share a scale.
        groups: The slice of scales.
        words: The slice of words with quantised values.
    """

    group: int
    groups: slice
    words: slice


def slice_inputs(inputs: Span, count: int, group: int, held: int) -> InputSlices:
    """Return the parts of a weight's scales and words that belong to a range of inputs.

    Args:
        inputs: First input, and end (exclusive).
        count: The number of all inputs of the weight.
        group: The number of inputs that share a scale. If it equals `count`, every range has this scale.
        held: The number of inputs per word.

    Raises:
        CannotSplit: The range begins or ends within a group or a word.
    """
    one, whole = group >= count, inputs == (0, count)
    group = inputs[1] - inputs[0] if one else group
    groups = ALL if one or whole else slice_of(inputs, group, "inputs")
    return InputSlices(group, groups, ALL if whole else slice_of(inputs, held, "inputs"))


def words_of(outputs: Span, held: int, count: int) -> slice:
    """Return the slice of words that hold the zero points of a range of outputs. The last word may not be full.

    Args:
        outputs: First output, and end (exclusive).
        held: Number of zero points per word.
        count: The number of all outputs of the weight.

    Raises:
        CannotSplit: The range begins or ends within a word.
    """
    if outputs[1] < count:
        return slice_of(outputs, held, "outputs")
    return slice(slice_of((outputs[0], outputs[0]), held, "outputs").start, None)


def is_float(tensor: StoredTensor) -> bool:
    """Return True if a tensor is stored in a float dtype that scales of weights may have."""
    return tensor.info.dtype in FLOAT_DTYPES


def are_groups(tensors: Stored, name: str, inputs: int, number: int) -> bool:
    """Return True if a tensor is int32 (inputs,) and assigns each input a group from 0 to number - 1.

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
