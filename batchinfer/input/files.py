"""Finds the input files of a job, and their names in the results."""

from __future__ import annotations

import fnmatch
import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from batchinfer.core.errors import InputCorrupt, InputMissing, StorageError
from batchinfer.filesystem.location import Location
from batchinfer.input.format_detection import compressible_formats, format_of, known_suffixes, named_by
from batchinfer.input.input_file import InputFile
from batchinfer.job.file import not_utf8


def list_inputs(patterns: str | Iterable[str], base: Path, named_format: str = "auto") -> list[InputFile]:
    """List the input files that the paths, folders and globs of `input.path` match.

    Each file is listed once. The files of each folder or glob are sorted. Folders are searched recursively for files
    with the suffix of an input format; hidden files and folders are skipped.

    Args:
        patterns: One path, folder or glob, or several.
        base: The folder that the file names in the results are relative to.
        named_format: The value of `input.format`, or "auto" to detect the format of each file.

    Raises:
        InputMissing: A file does not exist or is not a regular file, or a glob or folder has no input file.
        InputCorrupt: The name or the format of a file is not supported, or the files have different formats.
        StorageError: A file cannot be read.
    """
    entries = [patterns] if isinstance(patterns, str) else list(patterns)
    found = dict.fromkeys(location for entry in entries for location in _expand(Location(entry)))
    files = [_describe(location, base, named_format) for location in found]
    formats = {f.format for f in files}
    if len(formats) > 1:
        odd = next(f for f in files if f.format != files[0].format)
        raise InputCorrupt(
            f"{odd.path}: is {odd.format} while {files[0].path} is {files[0].format}; "
            "one job reads files of one format"
        )
    return files


def _expand(entry: Location) -> list[Location]:
    if entry.is_folder:
        found = entry.files_below(lambda name: named_by(name) is not None)
        if not found:
            raise InputMissing(
                f"{entry}: no input file in this folder; known suffixes are {known_suffixes()} "
                f"({compressible_formats()})"
            )
        return found
    if entry.exists:
        return [entry]
    if not entry.is_pattern:
        raise InputMissing(f"{entry}: there is no such file{_meant(entry)}")
    found = entry.matching()
    if not found:
        raise InputMissing(f"{entry}: the pattern matches no file{_meant(entry)}")
    return found


def _meant(entry: Location) -> str:
    near = entry.nearest()
    return "" if near is None else f" (did you mean {near}?)"


def would_read(patterns: Iterable[str], path: Path) -> bool:
    """Return True if a job with these values of `input.path` would read the file `path`. The file need not exist.

    Args:
        patterns: The paths, folders and globs of the job.
        path: An absolute path without symbolic links.
    """
    return any(_would_read(pattern, path) for pattern in patterns)


def _would_read(pattern: str, path: Path) -> bool:
    parts = Path(pattern).parts
    fixed = next((at for at, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    base = Path(os.path.realpath(Path(*parts[:fixed])))
    if not path.is_relative_to(base):
        return False
    below = path.relative_to(base).parts
    if fixed < len(parts):
        return _matches(below, parts[fixed:])
    return not below or (not any(part.startswith(".") for part in below) and named_by(path.name) is not None)


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    # In a glob, `**` matches any number of folders
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[at:], pattern[1:]) for at in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _describe(location: Location, base: Path, named_format: str) -> InputFile:
    if (shown := not_utf8(location.text)) is not None:
        raise InputCorrupt(f"{shown}: the name of the file holds bytes that are not UTF-8; rename it")
    try:
        facts = location.facts()
        if facts is None:  # a pipe can be read only once, and opening it may never end
            raise InputMissing(
                f"{location}: is not a regular file; write what comes from a pipe or device to a file"
            )
        form = format_of(location, named_format)
    except FileNotFoundError:
        raise InputMissing(f"{location}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"{location}: cannot be read: {error.strerror}") from None
    return InputFile.of(location, location.relative_to(base), form, facts)
