"""Reads and fully validates the header of a GGUF file, with limits on all sizes.

The layout is version 2 and 3 of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from batchinfer.core.errors import JobFileError, Mistake

# The package `gguf` is not used: it does not detect truncated files, and takes seconds for large vocabularies
MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ENTRIES = 1 << 24  # of an array; each takes a Python object. Vocabularies have up to a million tokens
MAX_TEXT = 1 << 26  # bytes of a text
AGAIN = "the download may be incomplete; download or convert the file again"
_SHOWN = 80  # maximum characters of a name in a message
_TEXT, _ARRAY = 8, 9
# Type numbers of scalars and their `struct` formats
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class GgmlType(NamedTuple):
    """A storage format of tensors in GGUF files, which store values in blocks.

    Args:
        name: The name, such as "Q4_K".
        values: The number of consecutive values of a row in a block.
        size: The number of bytes of a block.
    """

    name: str
    values: int
    size: int


TYPES: Mapping[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    20: GgmlType("IQ4_NL", 32, 18),
    23: GgmlType("IQ4_XS", 256, 136),
    30: GgmlType("BF16", 1, 2),
    39: GgmlType("MXFP4", 32, 17),
}


class GgufTensor(NamedTuple):
    """The location of a tensor in a GGUF file.

    Args:
        file: The file with the tensor.
        type: The storage format of its values.
        shape: The shape, with the fastest-varying dimension last, as in PyTorch.
        start: The offset of the tensor's first byte in the file.
        end: The offset of its end, exclusive.
    """

    file: Path
    type: GgmlType
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The header of a GGUF file.

    Args:
        metadata: The metadata by key. Arrays are lists.
        tensors: The tensors by name.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]


def wrong_gguf(path: Path, *messages: str, hint: str | None = None) -> JobFileError:
    """Return an error for a GGUF file that cannot be used. Its messages refer to the key model.path of the job file.

    Args:
        path: The file or folder.
        messages: One text per mistake.
        hint: Advice for the user about each mistake, or None.
    """
    return JobFileError(str(path), [Mistake("model.path", message, hint=hint) for message in messages])


def read_header(path: Path) -> GgufHeader:
    """Read and check the header of a GGUF file. Raises JobFileError if it is invalid or the file is truncated."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size < len(MAGIC):
            raise wrong_gguf(path, f"{path.name} has {size} bytes and is no GGUF file", hint=AGAIN)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(path, data).header()


class _HeaderReader:
    """Reads the values of a GGUF header one by one from a mapped file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        if self._data[: len(MAGIC)] != MAGIC:
            raise self._wrong(f"begins with {self._data[: len(MAGIC)]!r}; a GGUF file begins with {MAGIC!r}")
        self._at = len(MAGIC)
        version = self._number("I")
        if version not in VERSIONS:
            raise self._wrong(f"is GGUF of version {version}; wanted one of {VERSIONS}, little-endian")
        tensors, values = self._count("tensors", 24), self._count("values", 13)
        metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self._text("a key")
            if key in metadata:
                raise self._wrong(f"states {key[:_SHOWN]} twice")
            metadata[key] = self._value(key)
        return GgufHeader(metadata, self._tensors(tensors, metadata))

    def _wrong(self, what: str) -> JobFileError:
        return wrong_gguf(self._path, f"{self._path.name} {what}", hint=AGAIN)

    def _number(self, kind: str) -> int:
        return int(self._numbers(kind, 1)[0])

    def _numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        self._needs(count * struct.calcsize(f"<{kind}"))
        found = struct.unpack_from(f"<{count}{kind}", self._data, self._at)
        self._at += count * struct.calcsize(f"<{kind}")
        return found

    def _needs(self, size: int) -> None:
        if size > len(self._data) - self._at:
            raise self._wrong(f"ends after {len(self._data)} bytes, inside its header")

    def _count(self, what: str, least: int) -> int:
        count = self._number("Q")
        if count > MAX_ENTRIES:
            raise self._wrong(f"states {count} {what}; at most {MAX_ENTRIES} are read")
        if count * least > len(self._data) - self._at:
            raise self._wrong(f"states {count} {what}, more than its {len(self._data)} bytes hold")
        return count

    def _text(self, what: str) -> str:
        length = self._number("Q")
        self._needs(length)
        if length > MAX_TEXT:
            raise self._wrong(f"has {what} of {length} bytes; at most {MAX_TEXT} are read")
        start, self._at = self._at, self._at + length
        try:
            return self._data[start : self._at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._wrong(f"has {what} at byte {start} that is not UTF-8 ({error.reason})") from error

    def _value(self, key: str) -> Any:
        kind = self._number("I")
        if kind == _TEXT:
            return self._text(key)
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], 1)[0]
        if kind == _ARRAY:
            return self._array(key)
        raise self._wrong(f"states {key[:_SHOWN]} as a value of type {kind}, which no version of GGUF has")

    def _array(self, key: str) -> list[Any]:
        kind = self._number("I")
        if kind == _TEXT:
            return [self._text(key) for _ in range(self._count(f"texts in {key[:_SHOWN]}", 8))]
        if kind not in _SCALARS:
            raise self._wrong(f"states {key[:_SHOWN]} as an array of type {kind}; wanted numbers or texts")
        scalar = _SCALARS[kind]
        return [*self._numbers(scalar, self._count(f"numbers in {key[:_SHOWN]}", struct.calcsize(scalar)))]

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, GgufTensor]:
        entries = [self._entry() for _ in range(count)]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._wrong(f"states general.alignment {alignment!r}; wanted a power of two")
        base = -(-self._at // alignment) * alignment
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in found:
                raise self._wrong(f"holds the tensor {name[:_SHOWN]} twice")
            found[name] = self._tensor(name, shape, kind, base + offset)
        self._check_overlaps(found)
        return found

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._text("a tensor's name")
        dimensions = self._number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._wrong(f"has the tensor {name[:_SHOWN]} of {dimensions} dimensions")
        shape = self._numbers("Q", dimensions)[::-1]  # stored with the fastest-varying dimension first
        return name, shape, self._number("I"), self._number("Q")

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GgufTensor:
        found = TYPES.get(kind)
        if found is None:
            known = ", ".join(each.name for each in TYPES.values())
            problem = f"stores the tensor {name[:_SHOWN]} as ggml type {kind}, which is not supported"
            hint = f"supported are {known}; use a file with such a type, for example Q4_K_M or Q8_0"
            raise wrong_gguf(self._path, f"{self._path.name} {problem}", hint=hint)
        if shape[-1] % found.values:
            raise self._wrong(
                f"has the tensor {name[:_SHOWN]} {list(shape)}, rows that are no whole blocks of {found.name}"
            )
        end = start + math.prod(shape) // found.values * found.size
        if end > len(self._data):
            raise self._wrong(
                f"ends after {len(self._data)} bytes, and its tensor {name[:_SHOWN]} would end at {end}"
            )
        return GgufTensor(self._path, found, shape, start, end)

    def _check_overlaps(self, tensors: Mapping[str, GgufTensor]) -> None:
        last, at = "", 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < at:
                raise self._wrong(f"has the tensors {last[:_SHOWN]} and {name[:_SHOWN]} in the same place")
            last, at = name, tensor.end
