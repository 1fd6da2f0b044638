"""Input formats: what they are called, how their files are recognised, and where their readers are.

Nothing here imports Arrow: a run lists its files, and says so, before it imports anything large.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchinfer.input.input_file import InputFile
    from batchinfer.input.protocol import FormatReader, ReadOptions

_FOLDER = "batchinfer.input.formats"
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
# By what may follow the suffix of a format of lines
CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
TABS = (".tsv", ".tab")  # files whose fields are parted by tabs


@dataclass(frozen=True, slots=True)
class Format:
    """A format: what `input.format` calls it, what its files are called and begin with, and its reader."""

    name: str
    title: str  # for people
    suffixes: tuple[str, ...]
    reader: str  # "module:class" in formats/, a FormatReader; imported when a file is opened
    packed: bool = False  # whether .gz and .zst may follow the suffix
    magic: tuple[bytes, ...] = ()
    values_are_text: bool = False  # numbers and lists are written as text: a parameter's value is parsed

    def names(self, name: str) -> bool:
        """Whether a file of that name is in this format."""
        return (unpacked_name(name) if self.packed else name.lower()).endswith(self.suffixes)

    def open(self, file: InputFile, options: ReadOptions) -> FormatReader:
        """Return a reader of a file."""
        module, _, name = self.reader.partition(":")
        reader: FormatReader = getattr(import_module(f"{_FOLDER}.{module}"), name)(file, options)
        return reader


JSONL = Format("jsonl", "JSON lines", (".jsonl", ".ndjson", ".json"), "jsonl:JsonlReader", packed=True)
PARQUET = Format("parquet", "Parquet", (".parquet", ".pq"), "parquet:ParquetReader", magic=(b"PAR1",))
CSV = Format("csv", "CSV", (".csv", *TABS), "csv_table:CsvReader", packed=True, values_are_text=True)
ARROW = Format(
    "arrow",
    "Arrow",
    (".arrow", ".feather", ".ipc", ".arrows"),
    "arrow:ArrowReader",
    magic=(b"ARROW1", b"\xff\xff\xff\xff"),
)
FORMATS = (JSONL, PARQUET, CSV, ARROW)


def unpacked_name(name: str) -> str:
    """In small letters, without what tells how the file is packed."""
    small = name.lower()
    return next((small.removesuffix(ending) for ending in CODECS if small.endswith(ending)), small)
