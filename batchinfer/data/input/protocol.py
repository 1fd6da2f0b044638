"""The protocol of input formats: a reader of one file, and how files of the format are recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from batchinfer.data.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.lines import unpacked_name

BATCH_ROWS = 512  # of one chunk of a typed format at most


class FormatReader(Protocol):
    """One file of a format. After `chunks()` has ended, `sha256` identifies what was read."""

    sha256: str

    def schema(self) -> pa.Schema | None:
        """The columns and their types; None where the format declares none. Raises InputCorrupt."""

    def chunks(self) -> Iterator[InputChunk]:
        """Yield the rows in file order, not read yet, in memory that does not depend on the file's size.

        Raises InputCorrupt for a file that is damaged or changes meanwhile, StorageError, OutOfMemory.
        """


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How files of lines are written. `delimiter` None: the file's name or its header tells; `quote` None: none."""

    max_line_bytes: int = 16 << 20
    encoding: str = "utf-8"
    delimiter: str | None = None
    quote: str | None = '"'


DEFAULT_TEXT = TextOptions()


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read: `columns` are those that are wanted (None: all), where a format can leave out the others.

    `sample_bytes` ends the reading early: after about that many unpacked bytes of a format of lines.
    """

    text: TextOptions = DEFAULT_TEXT
    columns: Sequence[str] | None = None
    sample_bytes: int | None = None
    chunk: ChunkSize = DEFAULT_SIZE


@dataclass(frozen=True, slots=True)
class Format:
    """A format: what `input.format` calls it, what its files are called and begin with, and its reader."""

    name: str
    title: str  # for people
    suffixes: tuple[str, ...]
    packed: bool  # whether .gz and .zst may follow the suffix
    magic: tuple[bytes, ...]
    open: Callable[[InputFile, ReadOptions], FormatReader]
    values_are_text: bool = False  # numbers and lists are written as text: a parameter's value is parsed

    def names(self, name: str) -> bool:
        """Whether a file of that name is in this format."""
        return (unpacked_name(name) if self.packed else name.lower()).endswith(self.suffixes)
