"""Segments of a safetensors file that contain a parameter as it is, read without mapping the file.

Copying from the page cache takes a tenth of the time of page faults.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from batchinfer.core.hub import GGUF
from batchinfer.models.checkpoint.stored_parts import StoredPart, bytes_of, slices_of
from batchinfer.models.files.safetensors_header import data_start
from batchinfer.models.files.weight_files import StoredTensor
from batchinfer_kernels.cpu.memory import ReusedPages

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE_BYTES = 8 << 20  # bytes of a read if values are converted, which then are still in a CPU cache


@dataclass(frozen=True, slots=True)
class FileSegment:
    """A contiguous range of bytes of a safetensors file that contains exactly the values of a tensor.

    Args:
        file: The file.
        start: The offset of the first byte from the start of the file.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
    """

    file: Path
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def line_bytes(self) -> int:
        """Return the number of bytes of one index of the tensor's first dimension, such as a row of a matrix."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, to: Tensor, pages: ReusedPages) -> None:
        """Read the tensor from the file into another tensor.

        Args:
            to: A tensor of the same shape, of any dtype and on any device.
            pages: Buffers for values whose dtype or device must be converted.

        Raises:
            OSError: Reading failed, or the file has become shorter.
        """
        with self.file.open("rb", buffering=0) as file:
            if (to.dtype, to.device.type) == (self.dtype, "cpu"):
                self._fill(file.fileno(), 0, to)
                return
            lines = max(1, PIECE_BYTES // max(1, self.line_bytes))
            for part in range(0, self.shape[0], lines):
                into = to[part : part + lines]
                piece = pages.empty(tuple(into.shape), self.dtype)
                self._fill(file.fileno(), part, piece)
                into.copy_(piece)

    def _fill(self, file: int, line: int, to: Tensor) -> None:
        room = to.flatten().view(torch.uint8).numpy().data
        at, done = self.start + line * self.line_bytes, 0
        while done < len(room):
            count = os.preadv(file, [room[done:]], at + done)
            if not count:
                raise OSError(errno.EIO, "the file ends before its tensors do", str(self.file))
            done += count


def segment_of(tensors: Mapping[str, StoredTensor], part: StoredPart) -> FileSegment | None:
    """Return the range of a file that contains exactly a parameter, so that it can be read without mapping the file.

    Args:
        tensors: The stored tensors of the checkpoint by name.
        part: The part of a stored tensor that is the parameter.

    Returns:
        The range. None: the values are not stored as contiguous floats of a safetensors file in the parameter's layout,
        or this rank does not read them.
    """
    stored = part.stored
    if stored.rows or part.encoded is not None or part.elsewhere:
        return None
    tensor = tensors[stored.tensor]
    info, own = tensor.info, stored.part
    slices = slices_of(part.slices, stored.tensor, info.shape)
    span = bytes_of(info, slices)
    turned = own is not None and (own.every is not None or (own.transposed and len(info.shape) > 1))
    if span is None or turned or tensor.file.suffix == GGUF or info.dtype not in DTYPES:
        return None
    dtype, start = DTYPES[info.dtype], span[0]
    shape = tuple(
        len(range(size)[slices[at]]) if at < len(slices) else size for at, size in enumerate(info.shape)
    )
    if stored.index is not None:
        shape = shape[1:]
        start += stored.index * math.prod(shape) * dtype.itemsize
    if own is not None:
        lines = range(shape[0])[own.start : own.stop]
        start += lines.start * math.prod(shape[1:]) * dtype.itemsize
        shape = (len(lines), *shape[1:])
    return FileSegment(tensor.file, data_start(tensor.file) + info.start + start, shape, dtype)
