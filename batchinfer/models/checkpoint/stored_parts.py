"""The parts of stored tensors that a rank reads for its parameters. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from batchinfer.core.errors import CannotSplit
from batchinfer.core.hub import GGUF
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.tensor_names import StoredParameter, layer_names, table_names
from batchinfer.models.families.family import Part
from batchinfer.models.files.safetensors_header import TensorInfo
from batchinfer.models.formats.encoded_tensor import ALL, EncodedTensor, Shape, Slices, Span
from batchinfer.models.parallel.shard import ModelShard, ParameterShard, shard_layer, shard_table
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.parameters import EMBEDDING, HEAD, table_parameters

NO_SLICES: Slices = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a rank reads a parameter, or its part of a parameter: stored tensors of a checkpoint, or slices of them.

    Args:
        stored: The tensor that contains the parameter. Its `part` selects the parameter from the values that are read.
        encoded: The quantised or sparse format of the tensor. None: it is stored as floats.
        slices: The slices to read of each stored tensor, by name. Tensors without an entry are read completely.
        elsewhere: If True, another rank has the values, and this rank uses zeros.
    """

    stored: StoredParameter
    encoded: EncodedTensor | None = None
    slices: Slices = field(default_factory=dict)
    elsewhere: bool = False

    @property
    def key(self) -> object:
        """Return a value that is equal for parameters that can be taken from the same read of a stored matrix."""
        return (
            self.stored.tensor,
            self.stored.index,
            sorted((name, repr(at)) for name, at in self.slices.items()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the stored tensors to read, such as quantised values and scales."""
        if self.stored.rows:
            return self.stored.rows
        return (self.stored.tensor,) if self.encoded is None else self.encoded.stored


class StoredParts:
    """Finds out which stored tensors, or slices of them, a rank reads for the parameters of its shard."""

    def __init__(self, checkpoint: Checkpoint, shard: ModelShard) -> None:
        """Prepare to find the stored tensors of a shard.

        Raises:
            CannotSplit: The model cannot be sharded like this.
        """
        self._checkpoint, self._shard = checkpoint, shard
        self.spec = shard_spec(checkpoint.spec, shard)

    def tables(self) -> dict[str, StoredPart]:
        """Return where the rank reads each parameter outside of layers, such as the embedding, by name.

        Raises:
            CannotSplit: A stored tensor cannot be sliced like this.
        """
        whole = self._checkpoint
        names = table_names(whole.spec, whole.prefixes)
        there = {name: stored for name, stored in names.items() if stored.tensor in whole.shapes}
        if self._shard.is_whole:
            return {name: stored_part(whole, stored, None) for name, stored in there.items()}
        spec = self.spec
        wanted = [*table_parameters(spec)]
        if spec.begins and spec.has_head and {HEAD, EMBEDDING} <= there.keys() and HEAD not in wanted:
            # It may differ from the embedding although config.json says that they are tied
            wanted.append(HEAD)
        other = {EMBEDDING: HEAD, HEAD: EMBEDDING}
        found = {name: there[name if name in there else other[name]] for name in wanted}
        return {name: self._part(stored, shard_table(spec, name)) for name, stored in found.items()}

    def layer(self, index: int) -> dict[str, StoredPart]:
        """Return where the rank reads each parameter of a layer, by name.

        Args:
            index: The number of the layer in the shard, from 0.

        Raises:
            CannotSplit: A stored tensor cannot be sliced like this.
        """
        whole, shard = self._checkpoint, self._shard
        first = 0 if shard.layers is None else shard.layers[0]
        names = layer_names(whole.spec, first + index, whole.prefixes)
        own = self.spec.layers[index]
        shards = shard_layer(whole.spec.layers[first + index], own, shard)
        return {name: self._part(names[name], shard) for name, shard in shards.items()}

    def _part(self, stored: StoredParameter, shard: ParameterShard) -> StoredPart:
        return stored_part(self._checkpoint, stored, shard if self._shard.splits_layers else None)


def check_parts(checkpoint: Checkpoint, shard: ModelShard) -> None:
    """Check that the stored tensors of a checkpoint can be divided into shards like this one. Reads no weights.

    Raises:
        CannotSplit: They cannot be divided.
    """
    parts = StoredParts(checkpoint, shard)
    parts.tables()
    for index in range(len(parts.spec.layers)):
        parts.layer(index)


def stored_part(checkpoint: Checkpoint, stored: StoredParameter, shard: ParameterShard | None) -> StoredPart:
    """Return where a rank reads a parameter.

    Args:
        checkpoint: The checkpoint.
        stored: The location of the whole parameter.
        shard: The part of the parameter that the rank needs. None: all of it.

    Raises:
        CannotSplit: The stored tensors cannot be sliced like this.
    """
    encoded = checkpoint.encoded.get(stored.tensor)
    if shard is None or (shard.is_whole and stored.part is None):
        return StoredPart(stored, encoded)
    first = stored.tensor if encoded is None else encoded.stored[0]
    if checkpoint.tensors[first].file.suffix == GGUF:
        raise CannotSplit("tensors of a GGUF file are read as a whole, and cannot be sharded among ranks")
    try:
        return replace(_slice(checkpoint, stored, encoded, shard), elsewhere=shard.elsewhere)
    except CannotSplit as error:
        raise CannotSplit(f"{stored.tensor}: {error}") from None


def _slice(
    checkpoint: Checkpoint, stored: StoredParameter, encoded: EncodedTensor | None, shard: ParameterShard
) -> StoredPart:
    if stored.rows:
        rows = stored.rows if shard.outputs is None else stored.rows[slice(*shard.outputs)]
        columns = (ALL,) if shard.inputs is None else (slice(*shard.inputs),)
        return StoredPart(replace(stored, tensor=rows[0], rows=rows), None, dict.fromkeys(rows, columns))
    part, outputs = _slice_outputs(stored.part, shard.outputs)
    found = replace(stored, part=part)
    transposed = stored.part is not None and stored.part.transposed
    if encoded is not None:
        turned = transposed and not encoded.transposed
        both = _spans(encoded.shape[-2:], encoded.transposed, turned, outputs, shard.inputs)
        own, slices = encoded.slice(*both, stored.index)
        return StoredPart(found, own, slices)
    first = () if stored.index is None else (slice(stored.index, stored.index + 1),)
    sizes = checkpoint.tensors[stored.tensor].info.shape[len(first) :]
    spans = [ALL if span is None else slice(*span) for span in (outputs, shard.inputs)][: len(sizes)]
    return StoredPart(found, None, {stored.tensor: (*first, *(spans[::-1] if transposed else spans))})


def _spans(
    shape: Shape, transposed: bool, turned: bool, outputs: Span | None, inputs: Span | None
) -> tuple[Span, Span]:
    # A turned matrix is (inputs, outputs) when it is dequantised
    sizes = shape[::-1] if transposed or turned else shape
    spans = outputs or (0, sizes[0]), inputs or (0, sizes[1])
    return spans[::-1] if turned else spans


def _slice_outputs(part: Part | None, outputs: Span | None) -> tuple[Part | None, Span | None]:
    """Return which outputs of a tensor a rank reads, and where its part of a parameter is among them.

    Args:
        part: The location of the whole parameter in the tensor's outputs. None: it has all of them.
        outputs: The range of the parameter's outputs that the rank needs. None: all.

    Returns:
        (location of the parameter in the outputs that are read, range of outputs to read). None means all.
    """
    if part is None:
        return None, outputs
    found = part if part.index is None else replace(part, index=0)
    width = part.stop - part.start
    if part.every is None:
        first, end = outputs or (0, width)
        return replace(found, start=0, stop=end - first), (part.start + first, part.start + end)
    if outputs is None:
        return found, None
    first, end = outputs
    if first % width or end % width:
        raise CannotSplit(f"outputs {first} to {end} do not start and end at multiples of {width}")
    return found, (first // width * part.every, end // width * part.every)


def slices_of(slices: Slices, name: str, shape: Shape) -> tuple[slice, ...]:
    """Return the slices of a stored tensor to read; () for all of it.

    Args:
        slices: The slices of each tensor, by name. Tensors without an entry are read completely.
        name: The name of the tensor.
        shape: Its shape. A tensor with a single value is always read completely.
    """
    return slices.get(name, ())[: len(shape)] if math.prod(shape) != 1 else ()


def bytes_of(info: TensorInfo, slices: tuple[slice, ...]) -> Span | None:
    """Return the range of bytes that slices of a tensor occupy, from the tensor's first byte; None if it has gaps.

    Args:
        info: The dtype, shape and size of the tensor.
        slices: The slices, one for each of the first dimensions.
    """
    first, held, step = 0, 1, info.nbytes
    for size, part in zip(info.shape, slices, strict=False):
        span = range(size)[part]
        step //= max(1, size)
        if held > 1 and len(span) < size:
            return None
        first, held = first + span.start * step, held * len(span)
    return first, first + held * step
