"""The input of a job: its files, read as its job file says that they are written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchinfer.core.errors import InputMissing
from batchinfer.input.chunk import ChunkSize
from batchinfer.input.files import list_inputs
from batchinfer.input.input_file import InputFile
from batchinfer.input.protocol import DEFAULT_TEXT, TextOptions
from batchinfer.input.reader import Reader, SampleSize, Strata
from batchinfer.input.registry import by_name

if TYPE_CHECKING:
    from batchinfer.job import InputSection, Job

_READ_BY = {
    "encoding": ("JSONL and CSV", ("jsonl", "csv")),
    "delimiter": ("CSV", ("csv",)),
    "quote": ("CSV", ("csv",)),
}


def input_files(job: Job) -> list[InputFile]:
    """The files of `input.path`. Raises InputMissing, InputCorrupt, StorageError."""
    try:
        return list_inputs(job.input.path or "", job.source.parent, job.input.format)
    except InputMissing as error:
        raise InputMissing(f"{job.place('input.path')}: {error}") from error


def open_input(
    job: Job,
    files: Sequence[InputFile],
    sample: SampleSize | None = None,
    strata: Strata | None = None,
    chunk: ChunkSize | None = None,
) -> Reader:
    """Raises InputCorrupt for files that are not what they say, or whose schemas differ, and JobFileError where the
    job file says how they are written and their format has no such thing.
    """
    text = text_options(job.input)
    for name, (readers, formats) in _READ_BY.items():
        odd = next((file for file in files if file.format not in formats), None)
        if getattr(text, name) != getattr(DEFAULT_TEXT, name) and odd is not None:
            title = by_name(odd.format).title
            raise job.mistake(
                f"input.{name}", f"belongs to {readers}, and {odd.path} is {title}; take it out"
            )
    return Reader.open(files, text, sample, strata, chunk)


def text_options(section: InputSection) -> TextOptions:
    """How files of lines are written."""
    delimiter = None if section.delimiter == "auto" else section.delimiter
    quote = None if section.quote == "none" else section.quote
    return TextOptions(section.max_line_bytes, section.encoding, delimiter, quote)
