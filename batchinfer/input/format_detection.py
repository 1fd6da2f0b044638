"""Detects the format of input files, and rejects files in unsupported formats."""

from __future__ import annotations

from batchinfer.core.errors import InputCorrupt
from batchinfer.filesystem.location import Location
from batchinfer.input.format import CODECS, FORMATS, JSONL, MAGIC, Format

OPENAI = "openai"  # JSON lines that hold requests
# Formats that are not read: (first bytes of the file, kind of file, advice)
_UNSUPPORTED: tuple[tuple[bytes, str, str], ...] = (
    (b"PK\x03\x04", "a zip archive, as Excel workbooks are", "unpack it, or save the sheet as CSV"),
    (b"\xd0\xcf\x11\xe0", "an old Excel or Office file", "save the sheet as CSV"),
    (b"Obj\x01", "Avro", "convert it to Parquet"),
    (b"ORC", "ORC", "convert it to Parquet"),
    (b"FEA1", "Feather version 1", "write it again with pyarrow.feather.write_feather: version 2"),
    (b"SQLite format 3\x00", "a SQLite database", "export the table as CSV or Parquet"),
    (b"\x80", "a pickle", "it can run code when it is loaded: write the data as Parquet"),
    (b"\x89HDF", "HDF5", "convert the table to Parquet"),
    (b"BZh", "packed with bzip2", "unpack it, or pack it with gzip or zstd"),
    (b"\xfd7zXZ", "packed with xz", "unpack it, or pack it with gzip or zstd"),
    (b"<", "XML or HTML", "convert it to JSON lines or CSV"),
)  # fmt: skip
_HEAD = 512


def all_formats() -> str:
    """Return a list of the formats for messages: `JSON lines (.jsonl, .ndjson, .json), Parquet (.parquet, .pq), …`."""
    return ", ".join(f"{one.title} ({', '.join(one.suffixes)})" for one in FORMATS)


def compressible_formats() -> str:
    """Return a text for messages about compressed files: `JSON lines and CSV also with .gz, .zst, .zstd`."""
    return f"{' and '.join(one.title for one in FORMATS if one.compressible)} also with {', '.join(CODECS)}"


def by_name(name: str) -> Format:
    """Return the input format with this name, a value of `input.format` such as "csv". The name must exist."""
    return next(one for one in FORMATS if one.name == name)


def known_suffixes() -> str:
    """Return a list of the suffixes of all formats for messages: `.jsonl, .ndjson, …`."""
    return ", ".join(suffix for one in FORMATS for suffix in one.suffixes)


def named_by(name: str) -> Format | None:
    """Return the input format that the suffix of a file name implies, or None if the suffix is unknown."""
    return next((one for one in FORMATS if one.names(name)), None)


def format_of(location: Location, named: str) -> str:
    """Determine the format of an input file: by the job file, else by its suffix, else by its first bytes.

    Args:
        location: The path of the file.
        named: The value of `input.format`; "auto" if the job names no format.

    Returns:
        The name of the format, such as "csv".

    Raises:
        InputCorrupt: The format is unsupported.
        OSError: The file cannot be read.
    """
    if named != "auto":
        return JSONL.name if named == OPENAI else named
    by_suffix = named_by(location.name)
    with location.open() as file:
        head = file.read(_HEAD)
    _refuse_array(location, head)
    if by_suffix is not None:
        return by_suffix.name
    return _sniff(location, head)


def _refuse_array(location: Location, head: bytes) -> None:
    if location.text.lower().endswith(".json") and head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        raise InputCorrupt(
            f"{location}: holds one JSON array; JSON lines are needed, one object a line: "
            f"jq -c '.[]' {location.name} > rows.jsonl, or input.sql with read_json('{location}')"
        )


def _sniff(location: Location, head: bytes) -> str:
    for one in FORMATS:
        if head.startswith(one.magic):
            return one.name
    if not head or head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{") or head.startswith(tuple(MAGIC)):
        return JSONL.name
    if head[8:12] == b"DUCK":
        raise _unknown(location, "a DuckDB database", "export the table as Parquet or CSV")
    for magic, what, advice in _UNSUPPORTED:
        if head.startswith(magic):
            raise _unknown(location, what, advice)
    raise _unknown(
        location, "of a format that neither its name nor its content tells", "say it with input.format"
    )


def _unknown(location: Location, what: str, advice: str) -> InputCorrupt:
    return InputCorrupt(f"{location}: is {what}; {advice} (read are {all_formats()})")
