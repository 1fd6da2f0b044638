"""Reads the weights of a checkpoint layer by layer, in the dtype of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from batchinfer.core.hub import GGUF
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.file_segment import FileSegment, segment_of
from batchinfer.models.checkpoint.read_ahead import ReadAhead
from batchinfer.models.checkpoint.stored_parts import (
    NO_SLICES,
    StoredPart,
    StoredParts,
    slices_of,
    stored_part,
)
from batchinfer.models.checkpoint.tensor_names import StoredParameter
from batchinfer.models.families.family import Part
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer.models.formats.encoded_tensor import Codes, Slices
from batchinfer.models.formats.gguf import read_stored
from batchinfer.models.parallel.shard import WHOLE_MODEL, ModelShard
from batchinfer.models.spec.parameters import (
    BIAS,
    CLASSIFIER,
    DISTANCES,
    EMBEDDING,
    EMBEDDING_NORM,
    FINAL_NORM,
    HEAD,
    LINES,
    POSITIONS,
    SCALES,
    TOKEN_TYPES,
    ZEROS,
    fused_parameters,
)
from batchinfer.models.spec.spec import LinearSpec
from batchinfer_kernels.cpu.memory import ReusedPages

_NORMS = (FINAL_NORM, FINAL_NORM + BIAS, EMBEDDING_NORM, EMBEDDING_NORM + BIAS)
# The tensors of a layer by the names that `fused_parameters` yields: "qkv", "qkv.bias", "input_norm" and so on. Weights
# that stay quantised also have "qkv.scales" and, with block scales, "qkv.lines": see models.ops.layers.CodedWeight
LayerWeights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """The weights of a model outside of its layers: embeddings, final norm and head.

    Args:
        embedding: (vocab, hidden), the token embedding.
        head: (vocab, hidden), the output layer. If it is tied, this is the same object as `embedding`.
        norms: (hidden,) each: weights and biases of the norms outside of layers, by parameter name.
        positions: (positions, hidden), the embedding of learned positions. None: there is none.
        token_types: (types, hidden), the embedding of an encoder's token types. None: there is none.
        distances: (buckets, query heads), the learned bias of scores by distance (MPNet). None: there is none.
        classifier: The parameters of a classification head by name, float32 if they are from a checkpoint.
    """

    embedding: Tensor
    head: Tensor
    norms: Mapping[str, Tensor]
    positions: Tensor | None = None
    token_types: Tensor | None = None
    distances: Tensor | None = None
    classifier: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Tensor]) -> Tables:
        """Create the tables from tensors by parameter name.

        Args:
            found: The tensors. If either head or embedding is missing, both fields get the other tensor.
        """
        embedding, head = found.get(EMBEDDING), found.get(HEAD)
        table = embedding if embedding is not None else found[HEAD]
        return cls(
            embedding=table,
            head=table if head is None else head,
            norms={name: found[name] for name in _NORMS if name in found},
            positions=found.get(POSITIONS),
            token_types=found.get(TOKEN_TYPES),
            distances=found.get(DISTANCES),
            classifier={name: one for name, one in found.items() if name.startswith(CLASSIFIER)},
        )


class Weights(ABC):
    """A source of a model's weights, layer by layer, so that not all stored weights are in memory at the same time.

    Within a `with` block it may read ahead. Then `tables` must be called first, and `layer` in ascending order.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    @abstractmethod
    def tables(self) -> Tables:
        """Return the weights outside of layers: embeddings, final norm and head."""

    @abstractmethod
    def layer(self, index: int) -> LayerWeights:
        """Return the weights of the layer with number `index`, by name. The tensors share no memory with others."""


class ReadCount:
    """Counts the bytes of tensors that a loader reads from files or from the page cache.

    Bytes that were read ahead into the page cache count only when the loader reads them.
    """

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, count: int) -> None:
        """Count `count` bytes as read."""
        self.bytes += count


class CheckpointWeights(Weights):
    """A source of the weights of a checkpoint with safetensors or GGUF files.

    Safetensors files are mapped only while a layer is copied. A rank reads only its shard, whose layers are numbered
    from 0.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: ModelShard = WHOLE_MODEL,
        read: ReadCount | None = None,
    ) -> None:
        """Create the source; nothing is read yet.

        Args:
            checkpoint: The checkpoint.
            dtype: The dtype of the run. Weights that stay quantised keep theirs.
            device: The device of the weights.
            shard: The part of the model to read.
            read: Counts the bytes that are read. None: they are not reported.

        Raises:
            CannotSplit: The checkpoint cannot be sharded like this.
        """
        self._checkpoint = checkpoint
        self._parts = StoredParts(checkpoint, shard)
        self._dtype = dtype
        self._device = device
        self._count = ReadCount() if read is None else read
        self._ahead: ReadAhead | None = None
        self._pages = ReusedPages()

    def __enter__(self) -> Self:
        self._ahead = ReadAhead(self._checkpoint, self._parts)
        return self

    def __exit__(self, *details: object) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._pages.close()

    def tables(self) -> Tables:
        """Read the weights outside of layers: embeddings, final norm and head.

        Within a `with` block, it also starts to read layers ahead.
        """
        if self._ahead is not None:
            self._ahead.tables()
        parts = self._parts.tables()
        with _OpenFiles(self._checkpoint, self._count) as files:
            found = {
                name: self._join(
                    [files.found(part)], torch.float32 if name.startswith(CLASSIFIER) else self._dtype
                )
                for name, part in parts.items()
            }
        spec = self._parts.spec
        # transformers ties two stored tables only if they are equal, whatever config.json says
        both = EMBEDDING in found and HEAD in found
        if both and spec.tied and torch.equal(found[EMBEDDING], found[HEAD]):
            del found[HEAD]
        if not spec.begins:  # an empty one, which provides the dtype and the device
            found[EMBEDDING] = torch.empty(0, spec.hidden, dtype=self._dtype, device=self._device)
        return Tables.of(found)

    def layer(self, index: int) -> LayerWeights:
        """Read the weights of a layer of the shard, by name, such as "qkv".

        Weights that stay quantised have further tensors, such as "qkv.scales" and "qkv.zeros".
        """
        if self._ahead is not None:
            self._ahead.layer(index)
        self._pages.forget()
        layer, places = self._parts.spec.layers[index], self._parts.layer(index)
        with _OpenFiles(self._checkpoint, self._count) as files:

            def joined(parameters: Sequence[str]) -> Tensor:
                found = [files.found(places[parameter]) for parameter in parameters]
                return self._join(found, torch.float32 if parameters[0] in layer.vectors else self._dtype)

            found = dict(fused_parameters(layer, joined))
            for linear in layer.linears:
                if linear.stored_codes:
                    parts = [files.coded(places[part]) for part, _ in linear.parts]
                    found |= self._join_coded(linear, parts)
            return found

    def tensor(self, name: str) -> Tensor:
        """Read any stored tensor by name, also if it is no parameter of the model. It is dequantised if necessary."""
        part = stored_part(self._checkpoint, StoredParameter(name), None)
        with _OpenFiles(self._checkpoint, self._count) as files:
            return self._join([files.found(part)], self._dtype)

    def _join_coded(self, linear: LinearSpec, parts: Sequence[StoredCodes]) -> dict[str, Tensor]:
        copied = {
            linear.name: self._join([part.codes for part in parts], parts[0].codes.dtype),
            linear.name + SCALES: self._join([part.scales for part in parts], parts[0].scales.dtype),
        }
        if linear.form is not None and linear.form.scales == "block":
            first, lines = 0, []
            for part in parts:
                lines.append(part.lines + first)
                first += len(part.scales)
            copied[linear.name + LINES] = self._join(lines, torch.int32)
        if any(part.zeros is not None for part in parts):
            zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros for part in parts]
            copied[linear.name + ZEROS] = self._join(zeros, torch.float32)
        return copied

    def _join(self, parts: Sequence[Tensor | FileSegment], dtype: torch.dtype) -> Tensor:
        rows = sum(part.shape[0] for part in parts)
        whole = self._empty((rows, *parts[0].shape[1:]), dtype)
        start = 0
        for part in parts:
            into = whole[start : start + part.shape[0]]
            if isinstance(part, FileSegment):
                part.read(into, self._pages)
                self._count.add(part.shape[0] * part.line_bytes)
            else:
                into.copy_(part)
            start += part.shape[0]
        return whole

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # A CPU uses huge pages: a page fault per 4 KiB would take as much time as the copy
        if torch.device(self._device).type == "cpu":
            return self._pages.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class StoredCodes:
    """The values of a parameter (out, in) that stays quantised when it is loaded.

    Args:
        codes: The quantised values, (out, in), or packed as in `Codes` for MXFP4.
        scales: (out,), a scale per output; (out, groups), a scale per group of inputs; or (blocks, groups), a scale per
            block of outputs and group of inputs.
        lines: (out,) int32, the row of `scales` for each output. Only used for scales per block.
        zeros: (out, groups), the zero points. None: they are 0.
    """

    codes: Tensor
    scales: Tensor
    lines: Tensor
    zeros: Tensor | None = None


def segments_of(tensor: Tensor, stored: StoredParameter) -> Tensor:
    """Return the view of a stored tensor that contains only a parameter: (segments, outputs per segment, …).

    If the outputs of the parameter are contiguous, they form a single segment. Otherwise, the tensor stores them in
    segments, such as one per head.

    Args:
        tensor: The stored tensor.
        stored: The location of the parameter in it.
    """
    return _segments(tensor if stored.index is None else tensor[stored.index], stored.part)


def _segments(tensor: Tensor, part: Part | None) -> Tensor:
    if part is None:
        return tensor[None]
    outputs = tensor.t() if part.transposed and tensor.dim() > 1 else tensor
    segments = outputs[None] if part.every is None else outputs.view(-1, part.every, *outputs.shape[1:])
    return segments[:, part.start : part.stop]


class _OpenFiles:
    """Reads parameters from the files of a checkpoint.

    Files are mapped on first use, and closed at the end of `with`.
    """

    def __init__(self, checkpoint: Checkpoint, count: ReadCount) -> None:
        self._checkpoint, self._count = checkpoint, count
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}
        self._last: tuple[object, Tensor] | None = None
        self._last_codes: tuple[object, Codes] | None = None

    def __enter__(self) -> _OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._last, self._last_codes = None, None
        self._stack.close()

    def found(self, part: StoredPart) -> Tensor | FileSegment:
        """Return where a parameter is in a file; or its tensor, if its values are not stored contiguously."""
        return segment_of(self._checkpoint.tensors, part) or self.parameter(part)

    def parameter(self, part: StoredPart) -> Tensor:
        """Read a parameter in its stored dtype. Quantised values are dequantised to float32."""
        stored = part.stored
        if stored.rows:
            found = torch.stack([self._read(row, None, part.slices) for row in stored.rows])
        else:
            found = _segments(self._matrix(part), stored.part).flatten(0, 1)
        return torch.zeros_like(found) if part.elsewhere else found

    def coded(self, part: StoredPart) -> StoredCodes:
        """Read a parameter that stays quantised: its quantised values, scales and zero points."""
        stored, encoded = part.stored, part.encoded
        assert encoded is not None, "keep_quantized names encoded tensors"
        if self._last_codes is None or self._last_codes[0] != part.key:
            self._last_codes = part.key, encoded.codes(partial(self._read, slices=part.slices), stored.index)
        codes, form = self._last_codes[1], encoded.form
        place = stored.part and replace(stored.part, transposed=False)

        def own(tensor: Tensor) -> Tensor:
            return _segments(tensor, place).flatten(0, 1)

        lines = own(torch.arange(len(codes.values), dtype=torch.int32) // codes.high)
        # A part keeps the scales of all blocks; its lines select from them
        in_blocks = form is not None and form.scales == "block"
        scales = codes.scales if in_blocks else own(codes.scales)
        zeros = None if codes.zeros is None else own(codes.zeros)
        return StoredCodes(own(codes.values), scales, lines, zeros)

    def _matrix(self, part: StoredPart) -> Tensor:
        # A tensor may have a matrix per expert, so one is read at a time. The last is kept for its other parameters
        key = part.key
        if self._last is None or self._last[0] != key:
            self._last = key, self._unpack(part)
        return self._last[1]

    def _unpack(self, part: StoredPart) -> Tensor:
        name, index, encoded = part.stored.tensor, part.stored.index, part.encoded
        if encoded is None:
            return self._read(name, index, part.slices)
        read = partial(self._read, slices=part.slices)
        if encoded.matrices or index is None:
            return encoded.dequantize(read, index)
        return encoded.dequantize(read)[index]

    def _read(self, name: str, index: int | None = None, slices: Slices = NO_SLICES) -> Tensor:
        """Return a stored tensor: a view of a mapped safetensors file, or the tensor read from a GGUF file.

        Args:
            name: The name of the tensor.
            index: The matrix to return, if the tensor stores several. None: all.
            slices: The slices to return, by name of the tensor. Not used for GGUF files.
        """
        stored = self._checkpoint.tensors[name]
        if stored.file.suffix == GGUF:
            self._count.add(stored.info.nbytes)
            tensor = read_stored(stored)
            return tensor if index is None else tensor[index]
        tensor = self._map(stored, name, slices)
        tensor = tensor if index is None else tensor[index]
        self._count.add(tensor.nbytes)
        return tensor

    def _map(self, stored: StoredTensor, name: str, slices: Slices) -> Tensor:
        path = stored.file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        part = slices_of(slices, name, stored.info.shape)
        tensor: Tensor = self._open[path].get_slice(name)[part] if part else self._open[path].get_tensor(name)
        return tensor
