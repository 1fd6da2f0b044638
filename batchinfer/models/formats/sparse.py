"""Sparse weights of compressed-tensors checkpoints: non-zero values with a bit mask of their positions.

If two of each four inputs are zeros, GPUs have faster products (Mishra et al., 2021, "Accelerating Sparse Deep Neural
Networks"). Values may also be quantised; their scales are then stored as in another format.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from batchinfer.models.files.config_fields import checkpoint_error
from batchinfer.models.files.weight_files import FLOAT_DTYPES, StoredTensor
from batchinfer.models.formats.encoded_tensor import Codes, EncodedTensor, EncodedTensors, Read, Shape, Stored
from batchinfer_kernels.arithmetic import SPARSE_KEPT, SPARSE_QUAD, SPARSE_SIZES, WeightForm

if TYPE_CHECKING:
    from torch import Tensor

HALF = "sparse-24-bitmask"  # two of four adjacent inputs have a value
ANY = "sparse-bitmask"
DENSE = "dense"  # zeros are stored too
LAYOUTS = (HALF, ANY, DENSE)
HALF_STRUCTURE = "2:4"
_VALUES, _MASK, _SHAPE, _ROWS = "compressed", "bitmask", "shape", "row_offsets"
_QUANTISED = ("F8_E4M3", "I8")


def fill_masked(
    tensors: Stored, encoded: EncodedTensors
) -> tuple[dict[str, StoredTensor], dict[str, MaskedWeight]]:
    """Replace the stored tensors of sparse weights by entries for dense weights.

    Args:
        tensors: All tensors of the checkpoint.
        encoded: Receives error messages about tensors with wrong shapes.

    Returns:
        (tensors, sparse weights), both by name. In `tensors`, each sparse weight is one tensor of the dense shape
        instead of its values and mask.
    """
    whole, found = dict(tensors), dict[str, MaskedWeight]()
    for name in tensors:
        module = name.removesuffix(_VALUES)
        if module == name or not module.endswith("."):
            continue
        masked = _masked(encoded, module, tensors)
        if masked is not None:
            info = replace(tensors[name].info, shape=masked.shape)
            whole = {other: tensor for other, tensor in whole.items() if other not in masked.stored}
            whole[module + "weight"] = replace(tensors[name], info=info)
            found[module + "weight"] = masked
    return whole, found


def _masked(encoded: EncodedTensors, module: str, tensors: Stored) -> MaskedWeight | None:
    values, mask, shape, rows = (module + end for end in (_VALUES, _MASK, _SHAPE, _ROWS))
    if encoded.lacks(values, tensors, mask, shape):
        return None
    half = rows not in tensors
    stored = (values, mask, shape) if half else (values, mask, shape, rows)
    stated = tensors[shape].info
    right = stated.dtype in ("I64", "I32") and stated.shape in ((2,), (2, 1))
    outputs, inputs = tensors[shape].integers().tolist() if right else (0, 0)
    right = outputs > 0 and inputs > 0 and inputs % (SPARSE_QUAD if half else 1) == 0
    kept, bits = tensors[values].info, tensors[mask].info
    right = right and bits.dtype == "U8" and bits.shape == (outputs, -(-inputs // 8))
    right = right and (kept.shape == (outputs, inputs // 2) if half else len(kept.shape) == 1)
    right = right and kept.dtype in (*FLOAT_DTYPES, *_QUANTISED)
    found = MaskedWeight((outputs, inputs), stored, half)
    if not right:
        encoded.add(module + "weight", SparseTensor(found.shape, stored, found), tensors, fits=False)
        return None
    return found


@dataclass(frozen=True, slots=True)
class MaskedWeight:
    """How a sparse weight is stored: as its non-zero values, and a bit mask of their positions (outputs, inputs / 8).

    Attributes:
        shape: (outputs, inputs).
        stored: The names of the tensors with the values, the mask, the shape and, if `half` is False, row offsets.
        half: True if the weight is 2:4 sparse. Values are then (outputs, inputs / 2), and otherwise have one dimension.
    """

    shape: Shape
    stored: tuple[str, ...]
    half: bool

    def weight(self, read: Read) -> Tensor:
        """Read the values and the mask, and return the dense weight, (outputs, inputs), in the dtype of the values.

        Args:
            read: Returns a stored tensor by name.

        Raises:
            JobFileError: The mask does not fit the number of values.
        """
        import torch  # slow, and not needed to check a checkpoint

        values, mask = read(self.stored[0]), read(self.stored[1])
        places = (mask[..., None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)[:, : self.shape[1]]
        if self.half:
            fits = bool(
                (places.view(len(places), -1, SPARSE_QUAD).sum(-1, dtype=torch.uint8) == SPARSE_KEPT).all()
            )
        else:
            fits = int(places.sum()) == values.numel()
        if not fits:
            what = "two of each four inputs" if self.half else f"{values.numel()} values"
            raise checkpoint_error(Path(self.stored[1]), f"{self.stored[1]} does not mark {what}")
        coded = values.element_size() == 1  # torch lacks some operators for 8-bit floats
        own = values.view(torch.uint8) if coded else values
        whole = own.new_zeros(self.shape).masked_scatter_(places.bool(), own)
        return whole.view(values.dtype) if coded else whole


@dataclass(frozen=True, slots=True)
class SparseTensor(EncodedTensor):
    """A weight matrix of floats that is stored as its non-zero values and a bit mask.

    Attributes:
        masked: The values and the mask.
    """

    format: ClassVar[str] = "sparse weights"

    masked: MaskedWeight

    @property
    def quantized(self) -> bool:
        """Return False: the values are stored as floats."""
        return False

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the weight: 2:4 sparse.

        Returns None if it must be filled up with zeros, as the mask is not 2:4, or the shape is unsupported.
        """
        return sparse_form(self.shape) if self.masked.half else None

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the values and fill up zeros: (outputs, inputs), in the dtype of the values.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        return self.masked.weight(read)


@dataclass(frozen=True, slots=True)
class SparseCodes(EncodedTensor):
    """A weight matrix whose quantised values are stored as non-zero values and a bit mask.

    Attributes:
        masked: The values and the mask.
        inner: The weight as if its quantised values were stored with zeros. Reading it replaces its first stored tensor
            by the values with zeros filled up.
    """

    format: ClassVar[str] = "sparse and quantised weights"

    masked: MaskedWeight
    inner: EncodedTensor

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the quantised values with zeros filled up.

        Returns None if they must be dequantised.
        """
        return self.inner.form

    def codes(self, read: Read, index: int | None = None) -> Codes:
        """Read the quantised values, fill up zeros, and return the dense quantised values with their scales.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        return self.inner.codes(self._filled(read), index)

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Read the quantised values, fill up zeros, and dequantise the result to float32 (outputs, inputs).

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        return self.inner.dequantize(self._filled(read), index)

    def _filled(self, read: Read) -> Read:
        whole = self.inner.stored[0]
        return lambda name: self.masked.weight(read) if name == whole else read(name)


@dataclass(frozen=True, slots=True)
class DenseHalf(EncodedTensor):
    """A 2:4 sparse weight matrix of floats that is stored with its zeros: two of each four inputs."""

    format: ClassVar[str] = "2:4 sparse weights"

    plain: ClassVar[bool] = True

    @property
    def quantized(self) -> bool:
        """Return False: the values are stored as floats."""
        return False

    @property
    def form(self) -> WeightForm | None:
        """Return the form in which operators can use the weight: 2:4 sparse. None: its shape is unsupported."""
        return sparse_form(self.shape)

    def dequantize(self, read: Read, index: int | None = None) -> Tensor:
        """Return the stored weight unchanged.

        Args:
            read: Returns a stored tensor by name.
            index: Not used, as the weight is not a stack of matrices.
        """
        return read(self.stored[0])


def sparse_form(shape: Shape) -> WeightForm | None:
    """Return the form in which operators use a 2:4 sparse weight; None if GPUs have no sparse product for its shape.

    Args:
        shape: (outputs, inputs).
    """
    return None if any(size % SPARSE_SIZES for size in shape) else WeightForm("sparse", stored=True)


def add_masked(encoded: EncodedTensors, masked: dict[str, MaskedWeight], whole: Stored) -> None:
    """Add sparse weights to `encoded`. Weights that are already there as quantised weights become `SparseCodes`.

    Args:
        encoded: The weights of the checkpoint that were found so far.
        masked: The sparse weights by name, from `fill_masked`.
        whole: All tensors by name, from `fill_masked`.
    """
    for name, each in masked.items():
        inner = encoded.found.get(name)
        if inner is not None:
            stored = (*each.stored, *inner.stored[1:])
            encoded.found[name] = SparseCodes(each.shape, stored, each, inner)
        else:
            right = whole[name].info.dtype in FLOAT_DTYPES
            encoded.add(name, SparseTensor(each.shape, each.stored, each), whole, fits=True)
            if not right:
                encoded.mistakes.append(f"{each.stored[0]} is quantised, and its {name}_scale is missing")


def add_halves(encoded: EncodedTensors, tensors: Stored, modules: Collection[str]) -> None:
    """Add the float weights of modules to `encoded` as 2:4 sparse weights that are stored with their zeros.

    Args:
        encoded: The weights of the checkpoint that were found so far. They are skipped.
        tensors: All tensors of the checkpoint.
        modules: Names of the modules.
    """
    for module in modules:
        name = module + ".weight"
        tensor = tensors.get(name)
        if name not in encoded.found and tensor is not None and tensor.info.dtype in FLOAT_DTYPES:
            encoded.found[name] = DenseHalf(tensor.info.shape, (name,))


def sparse_modules(tensors: Stored, left_out: Collection[str]) -> Iterator[str]:
    """Yield the names of the modules whose weight is a matrix, as only these may be sparse.

    Args:
        tensors: The stored tensors by name.
        left_out: Names of modules to skip.
    """
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if module != name and len(tensor.info.shape) == 2 and module not in left_out:
            yield module
