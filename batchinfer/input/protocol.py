"""The interface of format readers, and their options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from batchinfer.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk
from batchinfer.input.input_file import InputFile

BATCH_ROWS = 512  # maximum number of rows in a chunk of a typed format


class FormatReader(Protocol):
    """The interface of the readers of one input file, with a class per format.

    Attributes:
        sha256: The hex digest of the bytes that were read, once `chunks()` has ended. "" if the file was not read to
            its end.
    """

    sha256: str

    def schema(self) -> pa.Schema | None:
        """Return the columns of the file and their types, or None if the format has no types. Raises InputCorrupt."""

    def chunks(self) -> Iterator[InputChunk]:
        """Yield all rows of the file in order, unparsed. The memory does not depend on the size of the file.

        Raises:
            InputCorrupt: The file is damaged, or changes while it is read.
            StorageError: The file cannot be read.
            OutOfMemory: A part of the file that must be read as a whole does not fit in memory.
        """


@dataclass(frozen=True, slots=True)
class TextOptions:
    """The encoding and syntax of text files (JSON lines, CSV).

    Args:
        max_line_bytes: The maximum length of a line or CSV record in bytes.
        encoding: The encoding of the text.
        delimiter: The delimiter of CSV fields, or None to detect it from the file name or the header.
        quote: The quote character of CSV, or None if fields are not quoted.
    """

    max_line_bytes: int = 16 << 20
    encoding: str = "utf-8"
    delimiter: str | None = None
    quote: str | None = '"'


DEFAULT_TEXT = TextOptions()
# Per file, the columns whose values are so large that only a few rows may be expanded at a time
WideColumns = dict[InputFile, Sequence[str]]


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options for reading one input file.

    Args:
        text: The encoding and syntax of text files.
        columns: The names of the columns to read, or None for all. A format that cannot skip columns ignores it.
        sample_bytes: The approximate number of decompressed bytes of a text file to read; None to read all.
        chunk: The maximum size of the chunks of text files.
        wide: A cache that all readers of a run share: per file, the columns with very large values.
    """

    text: TextOptions = DEFAULT_TEXT
    columns: Sequence[str] | None = None
    sample_bytes: int | None = None
    chunk: ChunkSize = DEFAULT_SIZE
    wide: WideColumns = field(default_factory=dict)
