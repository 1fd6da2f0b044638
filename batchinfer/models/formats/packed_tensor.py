"""A weight that a checkpoint stores as quantised values with scales, and a collection of them. No torch."""

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

# The stored tensor of a name, as a view of the mapped file
Read = Callable[[str], "Tensor"]
Shape = tuple[int, ...]
Stored = Mapping[str, StoredTensor]
Span = tuple[int, int]  # from the first to before the second
# Of the dimensions of stored tensors, by their names, those parts that are read; tensors of one value are read whole
Slices = Mapping[str, tuple[slice, ...]]
ALL = slice(None)


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """The quantised values of a matrix (N, K), with scales.

    Args:
        values: int8 or float8_e4m3fn (N, K), with int4 as int8 from -8 to 7. In MXFP4, uint8 (N, K / 2), with the first
            of two values in the lower bits.
        scales: float32 (N,), or (N / high, groups). In MXFP4, exponents uint8 (N, K / 32).
        high: The number of outputs that share a row of scales.
        zeros: Numbers (N, groups) to subtract from the values before scaling, or None.
    """

    values: Tensor
    scales: Tensor
    high: int = 1
    zeros: Tensor | None = None


@dataclass(frozen=True, slots=True)
class PackedTensor(ABC):
    """A weight of `shape` once it is dequantised, which is stored as the tensors `stored`: values, scales and more."""

    format: ClassVar[str]  # as messages call it
    # Whether `codes` has the transposes of the matrices that `dequantized` returns: an output's values are adjacent
    transposed: ClassVar[bool] = False
    plain: ClassVar[bool] = False  # True if its values are stored directly

    shape: Shape
    stored: tuple[str, ...]

    @property
    def matrices(self) -> bool:
        """Whether it holds several matrices, which can be read one at a time by their index."""
        return False

    @property
    def quantized(self) -> bool:
        """Whether its values were rounded when it was stored."""
        return True

    @property
    def form(self) -> WeightForm | None:
        """Return the form of the quantised values in memory, or None if they must be dequantised."""
        return None

    @abstractmethod
    def dequantized(self, read: Read, index: int | None = None) -> Tensor:
        """Return the weight, or the matrix with this index, as float32.

        Products of values and scales are exact or rounded once. A weight that is not quantised may keep its dtype.
        """

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Return the quantised values of the weight, or of the matrix with this index.

        Raises:
            TypeError: If the weight has no `form`.
        """
        raise TypeError(f"weights of {self.format} have to be dequantised")

    def cut(self, outputs: Span, inputs: Span, index: int | None = None) -> tuple[PackedTensor, Slices]:
        """Return the weight of these outputs and inputs alone, and the parts of the stored tensors that it is read of;
        with an index the first matrix of it is that matrix. Raises CannotSplit where codes or scales lie across the
        borders, or where parts of such tensors are not read."""
        raise CannotSplit(f"weights of {self.format} are read as a whole, and cannot be divided among ranks")


@dataclass(slots=True)
class PackedTensors:
    """The packed tensors of a checkpoint.

    Attributes:
        found: The packed tensors by the names of their weights.
        unused: Names of the stored tensors that nothing reads.
        mistakes: Faults of the packed tensors.
        notices: Lines about the packed tensors for the user.
    """

    found: dict[str, PackedTensor] = field(default_factory=dict)
    unused: set[str] = field(default_factory=set)
    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def stored(self) -> set[str]:
        """The names that they are stored under."""
        return {name for each in self.found.values() for name in each.stored}

    @property
    def told(self) -> Iterator[str]:
        """Yield the first mistakes, and how many more there are: mostly all layers have the same."""
        yield from self.mistakes[:NAMED]
        if more := len(self.mistakes[NAMED:]):
            yield f"{more} more quantised weights are as wrong"

    def add(self, name: str, packed: PackedTensor, tensors: Stored, fits: bool) -> None:
        """Note a packed tensor, also one that does not fit: it would be reported again as an unexpected one."""
        self.found[name] = packed
        if not fits:
            infos = [(each, tensors[each].info) for each in packed.stored]
            told = " and ".join(f"{each} {list(info.shape)} ({info.dtype})" for each, info in infos)
            self.mistakes.append(f"{told} are no weights of {packed.format} and their scales")

    def lacks(self, name: str, tensors: Stored, *needed: str) -> bool:
        """Whether tensors that belong to the quantised tensor `name` are missing, which is noted."""
        missing = [each for each in needed if each not in tensors]
        if missing:
            self.mistakes.append(f"{name} is quantised, and its {' and '.join(missing)} are missing")
        return bool(missing)

    def unpacked_shapes(self, tensors: Stored) -> Iterator[tuple[str, Shape]]:
        """Name → shape of all tensors once they are dequantised."""
        stored = self.stored
        yield from ((name, tensor.info.shape) for name, tensor in tensors.items() if name not in stored)
        yield from ((name, each.shape) for name, each in self.found.items())


class StoredFormat(ABC):
    """How config.json says that weights are stored."""

    @abstractmethod
    def find(self, tensors: Stored) -> PackedTensors:
        """Return the tensors that are stored so; all others are stored as they are."""


class QweightFormat(StoredFormat):
    """A format that stores a module's weight as tensors `qweight`, `scales` and `qzeros`."""

    def find(self, tensors: Stored) -> PackedTensors:
        packed = PackedTensors()
        for name in tensors:
            if name.endswith(".qweight"):
                self._add(packed, name.removesuffix("qweight"), tensors)
        return packed

    @abstractmethod
    def _add(self, packed: PackedTensors, module: str, tensors: Stored) -> None:
        """Note the weight of a module, whose name ends with a dot."""


def wrong_group(group: object) -> list[str]:
    """Return what is wrong with a number of inputs that share a scale."""
    if type(group) is int and (group == -1 or group > 0):
        return []
    return [f"group_size is {shown(group)}; wanted a number above 0, or -1 for all inputs"]


def int4_form(group: int, whole_zeros: bool = True) -> WeightForm | None:
    """Return the form of int4 in groups of `group` inputs, or None if operators do not support such groups."""
    fit = group > 0 and group % 8 == 0
    return WeightForm("int4", "group", stored=True, group=group, whole_zeros=whole_zeros) if fit else None


def slice_of(span: Span, unit: int, what: str) -> slice:
    """Return the places of a span whose `unit` values share one. Raises CannotSplit where it begins or ends within."""
    first, end = span
    if first % unit or end % unit:
        raise CannotSplit(
            f"{first} to {end} of its {what} are no whole groups of {unit}, of which each has a word or a scale"
        )
    return slice(first // unit, end // unit)


class InputCut(NamedTuple):
    """A cut along the inputs: the number of inputs that share a scale, and slices of the scales and words."""

    group: int
    groups: slice
    words: slice


def cut_inputs(inputs: Span, count: int, group: int, held: int) -> InputCut:
    """Return the cut of a span of inputs.

    Args:
        inputs: The span.
        count: The number of all inputs. If they share one scale, the cut has that scale.
        group: The number of inputs that share a scale.
        held: The number of inputs per word.

    Raises:
        CannotSplit: If the span would divide a group or a word.
    """
    one, whole = group >= count, inputs == (0, count)
    group = inputs[1] - inputs[0] if one else group
    groups = ALL if one or whole else slice_of(inputs, group, "inputs")
    return InputCut(group, groups, ALL if whole else slice_of(inputs, held, "inputs"))


def words_of(outputs: Span, held: int, count: int) -> slice:
    """Return the slice of words with the zeros of a span of `count` outputs. The last word may not be full."""
    if outputs[1] < count:
        return slice_of(outputs, held, "outputs")
    return slice(slice_of((outputs[0], outputs[0]), held, "outputs").start, None)


def is_float(tensor: StoredTensor) -> bool:
    """Whether a tensor holds floats that scales may have."""
    return tensor.info.dtype in FLOAT_DTYPES


def are_groups(tensors: Stored, name: str, inputs: int, number: int) -> bool:
    """Whether a tensor names one of a `number` of groups for each input."""
    found = tensors[name]
    if found.info.dtype != "I32" or found.info.shape != (inputs,):
        return False
    groups = found.integers()
    return not len(groups) or (int(groups.min()) >= 0 and int(groups.max()) < number)
