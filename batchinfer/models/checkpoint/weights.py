"""The weights of a checkpoint, read layer by layer in the run's dtype."""

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
from batchinfer.models.formats.gguf import read_stored
from batchinfer.models.formats.packed_tensor import Codes, Slices
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
    """The weights before and after the layers. If they are tied, `head` is the very tensor `embedding`."""

    embedding: Tensor  # (vocab, hidden)
    head: Tensor  # (vocab, hidden)
    norms: Mapping[str, Tensor]  # (hidden,) each, weights and biases by the names of their parameters
    positions: Tensor | None = None  # (max positions, hidden)
    token_types: Tensor | None = None  # (types, hidden)
    distances: Tensor | None = None  # (buckets, query heads)
    # Those of a classification head by the names of their parameters; a checkpoint's are float32
    classifier: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Tensor]) -> Tables:
        """Make them from tables by parameter name; if only one of embedding and head is there, it is both."""
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
    """Where a decoder gets its weights from, a layer at a time, so that it never needs them all twice. In a `with`
    block it may read ahead, and is asked for the tables and then for the layers in their order."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        return None

    @abstractmethod
    def tables(self) -> Tables:
        """Embedding, head and final norm."""

    @abstractmethod
    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer, in tensors of their own."""


class ReadCount:
    """Counts bytes of tensors as they are stored, each time that they are read, out of files or the page cache. What is
    read ahead is read again, and counts once."""

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, count: int) -> None:
        """Count so many more."""
        self.bytes += count


class CheckpointWeights(Weights):
    """Weights out of safetensors files, mapped only while a layer is copied out of them, or of GGUF files. Of a rank's
    part of a model nothing else is read; layers are counted from its first one."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device | str,
        shard: ModelShard = WHOLE_MODEL,
        read: ReadCount | None = None,
    ) -> None:
        """`read`: counts what is read. Raises CannotSplit where the checkpoint cannot be divided so."""
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
        if self._ahead is not None:
            self._ahead.tables()
        parts = self._parts.tables()
        with _OpenFiles(self._checkpoint, self._count) as files:
            found = {
                name: self._copied(
                    [files.found(part)], torch.float32 if name.startswith(CLASSIFIER) else self._dtype
                )
                for name, part in parts.items()
            }
        spec = self._parts.spec
        # transformers ties two stored tables only when they are equal, whatever config.json says
        both = EMBEDDING in found and HEAD in found
        if both and spec.tied and torch.equal(found[EMBEDDING], found[HEAD]):
            del found[HEAD]
        if not spec.begins:  # its dtype and device are asked for
            found[EMBEDDING] = torch.empty(0, spec.hidden, dtype=self._dtype, device=self._device)
        return Tables.of(found)

    def layer(self, index: int) -> LayerWeights:
        if self._ahead is not None:
            self._ahead.layer(index)
        self._pages.forget()
        layer, places = self._parts.spec.layers[index], self._parts.layer(index)
        with _OpenFiles(self._checkpoint, self._count) as files:

            def joined(parameters: Sequence[str]) -> Tensor:
                found = [files.found(places[parameter]) for parameter in parameters]
                return self._copied(found, torch.float32 if parameters[0] in layer.vectors else self._dtype)

            found = dict(fused_parameters(layer, joined))
            for linear in layer.linears:
                if linear.stored_codes:
                    parts = [files.coded(places[part]) for part, _ in linear.parts]
                    found |= self._coded(linear, parts)
            return found

    def tensor(self, name: str) -> Tensor:
        """Read a tensor that is no parameter of the model, dequantised where it is packed."""
        part = stored_part(self._checkpoint, StoredParameter(name), None)
        with _OpenFiles(self._checkpoint, self._count) as files:
            return self._copied([files.found(part)], self._dtype)

    def _coded(self, linear: LinearSpec, parts: Sequence[StoredCodes]) -> dict[str, Tensor]:
        """The parts above one another, with their scales and, where blocks share these, the lines that say which."""
        copied = {
            linear.name: self._copied([part.codes for part in parts], parts[0].codes.dtype),
            linear.name + SCALES: self._copied([part.scales for part in parts], parts[0].scales.dtype),
        }
        if linear.form is not None and linear.form.scales == "block":
            first, lines = 0, []
            for part in parts:
                lines.append(part.lines + first)
                first += len(part.scales)
            copied[linear.name + LINES] = self._copied(lines, torch.int32)
        if any(part.zeros is not None for part in parts):
            zeros = [torch.zeros_like(part.scales) if part.zeros is None else part.zeros for part in parts]
            copied[linear.name + ZEROS] = self._copied(zeros, torch.float32)
        return copied

    def _copied(self, parts: Sequence[Tensor | FileSegment], dtype: torch.dtype) -> Tensor:
        """The parts above one another, cast and read or copied in one pass."""
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
        """Memory to be written. A CPU's is in huge pages: a fault for every 4 KiB would take as long as the copy."""
        if torch.device(self._device).type == "cpu":
            return self._pages.empty(shape, dtype)
        return torch.empty(shape, dtype=dtype, device=self._device)


@dataclass(frozen=True, slots=True, eq=False)
class StoredCodes:
    """A parameter whose values are quantised, (N, K); of MXFP4 as `Codes` has them. Scales are (N,), or
    (blocks, groups) of which each output has a line, or like zeros (N, groups)."""

    codes: Tensor
    scales: Tensor
    lines: Tensor
    zeros: Tensor | None = None


def segments_of(tensor: Tensor, stored: StoredParameter) -> Tensor:
    """The part of a stored tensor that is the parameter, as a view: (stretches, outputs of each, …)."""
    return _segments(tensor if stored.index is None else tensor[stored.index], stored.part)


def _segments(tensor: Tensor, part: Part | None) -> Tensor:
    """Return the stretches of outputs that the part has of the tensor, or of one matrix in it."""
    if part is None:
        return tensor[None]
    outputs = tensor.t() if part.transposed and tensor.dim() > 1 else tensor
    stretches = outputs[None] if part.every is None else outputs.view(-1, part.every, *outputs.shape[1:])
    return stretches[:, part.start : part.stop]


class _OpenFiles:
    """The files of a checkpoint, mapped when first needed and unmapped at the end."""

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
        """Return where a parameter can be read as it is stored, or else read it."""
        return segment_of(self._checkpoint.tensors, part) or self.parameter(part)

    def parameter(self, part: StoredPart) -> Tensor:
        """Read a parameter as it is stored, or dequantised to float32."""
        stored = part.stored
        if stored.rows:
            found = torch.stack([self._read(row, None, part.slices) for row in stored.rows])
        else:
            found = _segments(self._matrix(part), stored.part).flatten(0, 1)
        return torch.zeros_like(found) if part.elsewhere else found

    def coded(self, part: StoredPart) -> StoredCodes:
        """Read a parameter's quantised values as they are stored, of a tensor that `keep_quantized` names."""
        stored, packed = part.stored, part.packed
        assert packed is not None, "keep_quantized names packed tensors"
        if self._last_codes is None or self._last_codes[0] != part.key:
            self._last_codes = part.key, packed.codes(partial(self._read, slices=part.slices), stored.index)
        codes, form = self._last_codes[1], packed.form
        place = stored.part and replace(stored.part, transposed=False)

        def own(tensor: Tensor) -> Tensor:
            return _segments(tensor, place).flatten(0, 1)

        lines = own(torch.arange(len(codes.values), dtype=torch.int32) // codes.high)
        # Of a part all scales of blocks are kept, which its lines choose from
        in_blocks = form is not None and form.scales == "block"
        scales = codes.scales if in_blocks else own(codes.scales)
        zeros = None if codes.zeros is None else own(codes.zeros)
        return StoredCodes(own(codes.values), scales, lines, zeros)

    def _matrix(self, part: StoredPart) -> Tensor:
        """A tensor, or one of the matrices in it, dequantised where it is packed. One matrix at a time: a tensor may
        hold those of hundreds of experts. Kept until another is asked for, since it may hold several parameters."""
        key = part.key
        if self._last is None or self._last[0] != key:
            self._last = key, self._unpacked(part)
        return self._last[1]

    def _unpacked(self, part: StoredPart) -> Tensor:
        name, index, packed = part.stored.tensor, part.stored.index, part.packed
        if packed is None:
            return self._read(name, index, part.slices)
        read = partial(self._read, slices=part.slices)
        if packed.matrices or index is None:
            return packed.dequantized(read, index)
        return packed.dequantized(read)[index]

    def _read(self, name: str, index: int | None = None, slices: Slices = NO_SLICES) -> Tensor:
        """A view of the mapped file, or what a GGUF file stores."""
        stored = self._checkpoint.tensors[name]
        if stored.file.suffix == GGUF:
            self._count.add(stored.info.nbytes)
            tensor = read_stored(stored)
            return tensor if index is None else tensor[index]
        tensor = self._mapped(stored, name, slices)
        tensor = tensor if index is None else tensor[index]
        self._count.add(tensor.nbytes)
        return tensor

    def _mapped(self, stored: StoredTensor, name: str, slices: Slices) -> Tensor:
        path = stored.file
        if path not in self._open:
            self._open[path] = self._stack.enter_context(safe_open(str(path), framework="pt", device="cpu"))
        part = slices_of(slices, name, stored.info.shape)
        tensor: Tensor = self._open[path].get_slice(name)[part] if part else self._open[path].get_tensor(name)
        return tensor
