"""Input formats: their names, how their files are recognised, and their readers.

This module must not import Arrow: a run lists its files and logs them before any large import.
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
# Suffixes of compressed files, which follow the suffix of the format
CODECS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}
TABS = (".tsv", ".tab")  # tab-separated files


@dataclass(frozen=True, slots=True)
class Format:
    """A format of input files: JSON lines, Parquet, CSV or Arrow.

    Args:
        name: The value of `input.format` that selects it.
        title: Its name in messages.
        suffixes: The suffixes of its files, in lower case.
        reader: The class that reads the files, as "module:class" in formats/. It is imported when a file is opened.
        compressible: True if the files may be compressed (.gz, .zst).
        magic: The byte strings that a file of this format can start with. Empty if the format has no signature.
        values_are_text: True if all values of a file are text, as in CSV. Numbers must then be parsed.
    """

    name: str
    title: str
    suffixes: tuple[str, ...]
    reader: str
    compressible: bool = False
    magic: tuple[bytes, ...] = ()
    values_are_text: bool = False

    def names(self, name: str) -> bool:
        """Return True if a file with this name has a suffix of this format, possibly followed by `.gz` or `.zst`."""
        return (uncompressed_name(name) if self.compressible else name.lower()).endswith(self.suffixes)

    def open(self, file: InputFile, options: ReadOptions) -> FormatReader:
        """Return a reader of this format for a file."""
        module, _, name = self.reader.partition(":")
        reader: FormatReader = getattr(import_module(f"{_FOLDER}.{module}"), name)(file, options)
        return reader


JSONL = Format("jsonl", "JSON lines", (".jsonl", ".ndjson", ".json"), "jsonl:JsonlReader", compressible=True)
PARQUET = Format("parquet", "Parquet", (".parquet", ".pq"), "parquet:ParquetReader", magic=(b"PAR1",))
CSV = Format("csv", "CSV", (".csv", *TABS), "csv_table:CsvReader", compressible=True, values_are_text=True)
ARROW = Format(
    "arrow",
    "Arrow",
    (".arrow", ".feather", ".ipc", ".arrows"),
    "arrow:ArrowReader",
    magic=(b"ARROW1", b"\xff\xff\xff\xff"),
)
FORMATS = (JSONL, PARQUET, CSV, ARROW)


def uncompressed_name(name: str) -> str:
    """Return a file name in lower case, and without a suffix of compression (`.gz`, `.zst`, `.zstd`) if it has one."""
    small = name.lower()
    return next((small.removesuffix(ending) for ending in CODECS if small.endswith(ending)), small)
