"""The protocol of a format's reader, which reads one file, and how it is to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk
from batchinfer.input.input_file import InputFile

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
# Of files, the columns with values that are too large to be unpacked in many rows at once
WideColumns = dict[InputFile, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read: `columns` are those that are wanted (None: all), where a format can leave out the others.

    `sample_bytes` ends the reading early: after about that many unpacked bytes of a format of lines. `wide` is shared
    by the readers of a run: what the first one learnt of a file by looking at all of its values.
    """

    text: TextOptions = DEFAULT_TEXT
    columns: Sequence[str] | None = None
    sample_bytes: int | None = None
    chunk: ChunkSize = DEFAULT_SIZE
    wide: WideColumns = field(default_factory=dict)
