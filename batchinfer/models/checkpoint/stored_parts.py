"""The parts of stored tensors that hold a rank's part of a parameter. No torch."""

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
from batchinfer.models.formats.packed_tensor import ALL, PackedTensor, Shape, Slices, Span
from batchinfer.models.parallel.shard import ModelShard, ParameterCut, layer_cuts, table_cut
from batchinfer.models.parallel.shard_spec import shard_spec
from batchinfer.models.spec.parameters import EMBEDDING, HEAD, table_parameters

NO_SLICES: Slices = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Stored tensors that a parameter is read of: their `slices`, or all of those that have none. `stored` says where
    the parameter lies in what is read, `packed` what it is packed as."""

    stored: StoredParameter
    packed: PackedTensor | None = None
    slices: Slices = field(default_factory=dict)
    elsewhere: bool = False  # another rank has the values, and here are zeros

    @property
    def key(self) -> object:
        """Return what tells the matrix that is read from others."""
        return (
            self.stored.tensor,
            self.stored.index,
            sorted((name, repr(at)) for name, at in self.slices.items()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the stored tensors that are read."""
        if self.stored.rows:
            return self.stored.rows
        return (self.stored.tensor,) if self.packed is None else self.packed.stored


class StoredParts:
    """The parts of a checkpoint's tensors that a rank's part of the model is read of."""

    def __init__(self, checkpoint: Checkpoint, place: ModelShard) -> None:
        """Raises CannotSplit where the model cannot be divided so."""
        self._checkpoint, self._place = checkpoint, place
        self.spec = shard_spec(checkpoint.spec, place)

    def tables(self) -> dict[str, StoredPart]:
        """Return the parts of the parameters before and after the layers that the checkpoint has."""
        whole = self._checkpoint
        names = table_names(whole.spec, whole.prefixes)
        there = {name: place for name, place in names.items() if place.tensor in whole.shapes}
        if self._place.is_whole:
            return {name: stored_part(whole, place, None) for name, place in there.items()}
        spec = self.spec
        wanted = [*table_parameters(spec)]
        if spec.begins and spec.has_head and {HEAD, EMBEDDING} <= there.keys() and HEAD not in wanted:
            wanted.append(HEAD)  # it may be another one, although they are said to be tied
        other = {EMBEDDING: HEAD, HEAD: EMBEDDING}
        places = {name: there[name if name in there else other[name]] for name in wanted}
        return {name: self._part(place, table_cut(spec, name)) for name, place in places.items()}

    def layer(self, index: int) -> dict[str, StoredPart]:
        """Return the parts of the parameters of a layer, counted from the first one of the rank."""
        whole, place = self._checkpoint, self._place
        first = 0 if place.layers is None else place.layers[0]
        names = layer_names(whole.spec, first + index, whole.prefixes)
        own = self.spec.layers[index]
        cuts = layer_cuts(whole.spec.layers[first + index], own, place)
        return {name: self._part(names[name], cut) for name, cut in cuts.items()}

    def _part(self, stored: StoredParameter, cut: ParameterCut) -> StoredPart:
        return stored_part(self._checkpoint, stored, cut if self._place.cuts_layers else None)


def check_parts(checkpoint: Checkpoint, place: ModelShard) -> None:
    """Raises CannotSplit where the checkpoint cannot be divided so: before anything is read."""
    parts = StoredParts(checkpoint, place)
    parts.tables()
    for index in range(len(parts.spec.layers)):
        parts.layer(index)


def stored_part(checkpoint: Checkpoint, stored: StoredParameter, cut: ParameterCut | None) -> StoredPart:
    """Return what is read for a rank's part of a parameter; None: the rank's layers are all there, and their tensors
    are read as they are. Raises CannotSplit where the stored tensors cannot be divided so."""
    packed = checkpoint.packed.get(stored.tensor)
    if cut is None or (cut.is_whole and stored.part is None):
        return StoredPart(stored, packed)
    first = stored.tensor if packed is None else packed.stored[0]
    if checkpoint.tensors[first].file.suffix == GGUF:
        raise CannotSplit("the tensors of a GGUF file are read as a whole, and cannot be divided among ranks")
    try:
        return replace(_cut(checkpoint, stored, packed, cut), elsewhere=cut.elsewhere)
    except CannotSplit as error:
        raise CannotSplit(f"{stored.tensor}: {error}") from None


def _cut(
    checkpoint: Checkpoint, stored: StoredParameter, packed: PackedTensor | None, cut: ParameterCut
) -> StoredPart:
    if stored.rows:
        rows = stored.rows if cut.outputs is None else stored.rows[slice(*cut.outputs)]
        columns = (ALL,) if cut.inputs is None else (slice(*cut.inputs),)
        return StoredPart(replace(stored, tensor=rows[0], rows=rows), None, dict.fromkeys(rows, columns))
    part, outputs = _narrowed(stored.part, cut.outputs)
    found = replace(stored, part=part)
    transposed = stored.part is not None and stored.part.transposed
    if packed is not None:
        turned = transposed and not packed.transposed
        both = _spans(packed.shape[-2:], packed.transposed, turned, outputs, cut.inputs)
        own, slices = packed.cut(*both, stored.index)
        return StoredPart(found, own, slices)
    first = () if stored.index is None else (slice(stored.index, stored.index + 1),)
    sizes = checkpoint.tensors[stored.tensor].info.shape[len(first) :]
    spans = [ALL if span is None else slice(*span) for span in (outputs, cut.inputs)][: len(sizes)]
    return StoredPart(found, None, {stored.tensor: (*first, *(spans[::-1] if transposed else spans))})


def _spans(
    shape: Shape, transposed: bool, turned: bool, outputs: Span | None, inputs: Span | None
) -> tuple[Span, Span]:
    """Return the spans of a packed matrix, which has this shape, in the order in which its `cut` takes them."""
    sizes = shape[::-1] if transposed or turned else shape
    spans = outputs or (0, sizes[0]), inputs or (0, sizes[1])
    return spans[::-1] if turned else spans


def _narrowed(part: Part | None, outputs: Span | None) -> tuple[Part | None, Span | None]:
    """Return where outputs of a parameter lie among those of its module that are read, and these. The index is that
    of what is read."""
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
        raise CannotSplit(f"outputs {first} to {end} lie across stretches of {width} of another product's")
    return found, (first // width * part.every, end // width * part.every)


def slices_of(slices: Slices, name: str, shape: Shape) -> tuple[slice, ...]:
    """Return the part of a stored tensor that is read; (): all of it, as also where it is a single value."""
    return slices.get(name, ())[: len(shape)] if math.prod(shape) != 1 else ()


def bytes_of(info: TensorInfo, slices: tuple[slice, ...]) -> Span | None:
    """Return the bytes of a tensor, from its first one, that a part of it takes; None if others lie between them."""
    first, held, step = 0, 1, info.nbytes
    for size, part in zip(info.shape, slices, strict=False):
        span = range(size)[part]
        step //= max(1, size)
        if held > 1 and len(span) < size:
            return None
        first, held = first + span.start * step, held * len(span)
    return first, first + held * step
