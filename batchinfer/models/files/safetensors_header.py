"""The header of a safetensors file, read with bounds and checked completely before the file is mapped."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchinfer.core.errors import SecurityRefusal
from batchinfer.models.files.config_fields import shown

# The safetensors library is not used for this: it accepts duplicate names, unknown fields and 70 dimensions, does not
# return offsets without the tensors, and does not name the tensor that has a wrong size.
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
PREFIX_BYTES = 8
DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """The entry of a tensor in the header of a safetensors or GGUF file.

    Args:
        dtype: The dtype as safetensors spells it, such as "BF16".
        shape: The shape.
        start: The first byte, counted from the start of the file's data section.
        end: The end (exclusive), counted in the same way.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return self.end - self.start


class _Malformed(ValueError):
    """The header of a file is malformed. Callers raise a SecurityRefusal with the name of the file instead."""


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of a safetensors file, and return its tensors by name.

    Raises:
        SecurityRefusal: The header is malformed, or does not match the size of the file.
    """
    try:
        return _read(path)
    except _Malformed as error:
        raise _refusal(path, error) from error


def data_start(path: Path) -> int:
    """Return the offset of a safetensors file's data section, in bytes. Raises OSError."""
    with path.open("rb") as file:
        return PREFIX_BYTES + int.from_bytes(file.read(PREFIX_BYTES), "little")


def read_metadata(path: Path) -> dict[str, str]:
    """Return `__metadata__` of a safetensors header; {} if it has none.

    Raises:
        SecurityRefusal: The header is malformed.
    """
    try:
        return _parse(_header(path))[1]
    except _Malformed as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: _Malformed) -> SecurityRefusal:
    return SecurityRefusal(
        f"{path}: malformed safetensors header: {error}; download or convert the file again"
    )


def _read(path: Path) -> dict[str, TensorInfo]:
    header = _header(path)
    tensors = {name: _tensor(name, entry) for name, entry in _parse(header)[0].items()}
    _check_layout(tensors, path.stat().st_size - PREFIX_BYTES - len(header))
    return tensors


def _header(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(_exactly(file.read(PREFIX_BYTES), PREFIX_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size - PREFIX_BYTES):
            raise _Malformed(
                f"it claims {length} bytes; the file has {size}, and at most {MAX_HEADER_BYTES} are read"
            )
        return _exactly(file.read(length), length)


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise _Malformed(f"the file ends after {len(data)} of {length} bytes")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Malformed("a name occurs twice")
    return found


def _parse(header: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_unique)
    except _Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"not JSON in UTF-8 ({shown(str(error))})") from error
    if not isinstance(raw, dict):
        raise _Malformed(f"not a JSON object but {shown(raw)}")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _Malformed("__metadata__ is not an object of strings")
    return raw, metadata


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _counts(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(_is_count(v) for v in value):
        return tuple(value)
    return None


def _tensor(name: str, entry: Any) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _Malformed(f"tensor {shown(name)} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], _counts(entry["shape"]), _counts(entry["data_offsets"])
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _Malformed(f"tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if shape is None or len(shape) > 16:
        raise _Malformed(f"tensor {shown(name)} has the shape {shown(entry['shape'])}")
    if offsets is None or len(offsets) != 2:
        raise _Malformed(f"tensor {shown(name)} has the offsets {shown(entry['data_offsets'])}")
    info = TensorInfo(dtype, shape, *offsets)
    if info.nbytes != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise _Malformed(
            f"tensor {shown(name)}: {dtype} of shape {shown(shape)} does not fill [{info.start}, {info.end})"
        )
    return info


def _check_layout(tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    end = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != end:
            raise _Malformed(
                f"tensor {shown(name)} begins at byte {info.start}, not {end}: a hole or an overlap"
            )
        end = info.end
    if end != data_bytes:
        raise _Malformed(f"its tensors fill {end} bytes, the file holds {data_bytes}")
