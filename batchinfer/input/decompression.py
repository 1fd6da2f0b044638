"""The size of typed values when expanded, and the rejection of decompression bombs.

A dictionary value or the bytes of a view may be used by any number of rows, so the stored size does not bound the
expanded size.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchinfer.core.errors import InputCorrupt

ROW_BYTES = 64  # minimum size of a row: even a row of nulls costs time and disk space
_BOMB_BYTES = 256 << 20
_BOMB_RATIO = 1000  # columns of text reach a ratio of 50


def is_bomb(compressed: int, expanded: int) -> bool:
    """Return True for a decompression bomb: it expands to more than 256 MiB, and to more than 1000 times its size.

    Args:
        compressed: The compressed size in bytes.
        expanded: The expanded size in bytes.
    """
    return expanded > _BOMB_BYTES and expanded > _BOMB_RATIO * compressed


def refuse_bomb(place: str, compressed: int, expanded: int) -> None:
    """Raise InputCorrupt if `is_bomb` is true for the sizes of a file.

    Args:
        place: The name of the file or its part, for the message.
        compressed: The compressed size in bytes.
        expanded: The expanded size in bytes.
    """
    if is_bomb(compressed, expanded):
        raise InputCorrupt(
            f"{place}: {compressed:,} bytes would unpack to {expanded:,} or more; that looks like a decompression "
            "bomb. If the rows are meant to be so, let a query make them: input.sql"
        )


class BombGuard:
    """Adds up the expanded size of the batches of one file, to detect a decompression bomb.

    Args:
        path: The path of the file, for messages.
        compressed: The size of the file in bytes, or None to check nothing.
    """

    def __init__(self, path: str, compressed: int | None) -> None:
        self._path, self._compressed = path, compressed
        self._expanded = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add the expanded size of a batch. Raises InputCorrupt if the file now looks like a decompression bomb."""
        if self._compressed is not None:
            self._expanded += batch.num_rows * ROW_BYTES + expanded_size(batch)
            refuse_bomb(self._path, self._compressed, self._expanded)


def expanded_size(batch: pa.RecordBatch) -> int:
    """Return the size in bytes that a batch would have with its dictionaries and views expanded."""
    return sum(column_size(column) for column in batch.columns)


def column_size(column: pa.Array) -> int:
    """Return the size in bytes that an array would have with its dictionaries and views expanded."""
    kind = column.type
    if isinstance(kind, pa.ExtensionType | pa.BaseExtensionType):
        return column_size(column.storage)
    if pa.types.is_dictionary(kind):
        return _dictionary_size(column)
    if kind in (pa.string_view(), pa.binary_view()):  # the first of a view's four numbers is its length
        views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
        return int(views[column.offset : column.offset + len(column), 0].astype(np.int64).sum())
    if pa.types.is_map(kind):
        start, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        return sum(column_size(child.slice(start, end - start)) for child in (column.keys, column.items))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return column_size(column.flatten()) + 8 * len(column)
    if pa.types.is_struct(kind):
        return sum(column_size(child) for child in column.flatten())
    return int(column.nbytes)


def longest_value(column: pa.Array) -> int:
    """Return the size in bytes of a column's longest text or binary value.

    For other types, return the size of the whole column, as an upper bound.
    """
    values = column.dictionary if pa.types.is_dictionary(column.type) else column
    return (
        int(pc.max(pc.binary_length(values)).as_py() or 0) if _is_text(values.type) else column_size(values)
    )


def _dictionary_size(column: pa.Array) -> int:
    kind = column.type.value_type
    if not _is_text(kind):
        return int(column.dictionary_decode().nbytes)
    indices = column.indices.drop_null()
    values = column.dictionary
    wide = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
    offsets = np.frombuffer(values.buffers()[1], wide)[values.offset :] if len(values) else np.zeros(1, wide)
    at = pc.cast(indices, pa.int64()).to_numpy()
    return int((offsets[at + 1].astype(np.int64) - offsets[at]).sum()) if len(at) else 0


def _is_text(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def fixed_width(kind: pa.DataType) -> int:
    """Return the bytes that each value of a fixed-size binary, list or struct type takes. 0 for all other types."""
    if isinstance(kind, pa.BaseExtensionType):
        return fixed_width(kind.storage_type)
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    if pa.types.is_fixed_size_list(kind):
        return int(kind.list_size) * max(1, fixed_width(kind.value_type))
    if pa.types.is_struct(kind):
        return sum(fixed_width(kind.field(at).type) for at in range(kind.num_fields))
    return 0
