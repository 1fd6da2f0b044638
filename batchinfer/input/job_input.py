"""Opens the input of a job with the options of its job file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchinfer.core.errors import InputMissing
from batchinfer.input.chunk import ChunkSize
from batchinfer.input.files import list_inputs
from batchinfer.input.format_detection import by_name
from batchinfer.input.input_file import InputFile
from batchinfer.input.protocol import DEFAULT_TEXT, TextOptions
from batchinfer.input.reader import Reader, SampleSize, SpreadSample

if TYPE_CHECKING:
    from batchinfer.job import InputSection, Job

_READ_BY = {
    "encoding": ("JSONL and CSV", ("jsonl", "csv")),
    "delimiter": ("CSV", ("csv",)),
    "quote": ("CSV", ("csv",)),
}


def input_files(job: Job) -> list[InputFile]:
    """List the files that `input.path` of a job matches. Raises InputMissing, InputCorrupt or StorageError."""
    try:
        return list_inputs(job.input.path or "", job.source.parent, job.input.format)
    except InputMissing as error:
        raise InputMissing(f"{job.place('input.path')}: {error}") from error


def open_input(
    job: Job,
    files: Sequence[InputFile],
    sample: SampleSize | None = None,
    strata: SpreadSample | None = None,
    chunk: ChunkSize | None = None,
) -> Reader:
    """Open the input files of a job, and read their schemas.

    Args:
        job: The job, with the options of its section `input`.
        files: The files of `input.path`, or the file with the result of `input.sql`.
        sample: How many rows to yield from the start of each file. None for all rows.
        strata: Which rows to yield, spread over all files. None for all rows.
        chunk: The maximum size of a chunk of a text file, or None for the default.

    Raises:
        InputCorrupt: A file is not in its format, or the schemas of two files differ.
        JobFileError: The job file sets an option that the format of a file does not support.
    """
    text = text_options(job.input)
    for name, (readers, formats) in _READ_BY.items():
        odd = next((file for file in files if file.format not in formats), None)
        if getattr(text, name) != getattr(DEFAULT_TEXT, name) and odd is not None:
            title = by_name(odd.format).title
            raise job.mistake(f"input.{name}", f"belongs to {readers}, and {odd.path} is {title}; remove it")
    return Reader.open(files, text, sample, strata, chunk)


def text_options(section: InputSection) -> TextOptions:
    """Return the options for text files (encoding, delimiter, quote, line length) of the section `input` of a job."""
    delimiter = None if section.delimiter == "auto" else section.delimiter
    quote = None if section.quote == "none" else section.quote
    return TextOptions(section.max_line_bytes, section.encoding, delimiter, quote)
