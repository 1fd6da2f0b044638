"""Finds the files that a job reads, and their names in the results."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from batchinfer.core.errors import InputCorrupt, InputMissing, StorageError
from batchinfer.core.text import nearest
from batchinfer.input.input_file import InputFile
from batchinfer.input.registry import format_of, known_suffixes, named_by, packed_formats
from batchinfer.job.file import not_utf8


def list_inputs(patterns: str | Iterable[str], base: Path, named_format: str = "auto") -> list[InputFile]:
    """Files for a path, a folder, a glob or a list of these, each once, sorted within each entry.

    Folders are searched with all their subfolders for known suffixes; hidden files and folders are skipped.
    Raises InputMissing for a missing file and a glob or folder without files, InputCorrupt for mixed formats.
    """
    entries = [patterns] if isinstance(patterns, str) else list(patterns)
    paths = dict.fromkeys(path for entry in entries for path in _expand(entry))
    files = [_describe(path, base, named_format) for path in paths]
    formats = {f.format for f in files}
    if len(formats) > 1:
        odd = next(f for f in files if f.format != files[0].format)
        raise InputCorrupt(
            f"{odd.path}: is {odd.format} while {files[0].path} is {files[0].format}; "
            "one job reads files of one format"
        )
    return files


def _expand(entry: str) -> list[str]:
    if os.path.isdir(entry):
        found = sorted(_walk(entry))
        if not found:
            raise InputMissing(
                f"{entry}: no input file in this folder; known suffixes are {known_suffixes()} "
                f"({packed_formats()})"
            )
        return found
    if os.path.lexists(entry):
        return [entry]
    if not glob.has_magic(entry):
        raise InputMissing(f"{entry}: there is no such file{_meant(entry)}")
    found = sorted(p for p in glob.glob(entry, recursive=True) if os.path.isfile(p))
    if not found:
        raise InputMissing(f"{entry}: the pattern matches no file{_meant(_fixed(entry))}")
    return found


def _fixed(pattern: str) -> str:
    """Return the folder of a pattern before its first wildcard."""
    parts = Path(pattern).parts
    return str(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts)))


def _meant(path: str) -> str:
    """Return a hint with the file or folder that was probably meant; empty if there is none."""
    name = ""
    while not os.path.isdir(path):
        path, name = os.path.split(path)
    try:
        near = nearest(name, sorted(os.listdir(path))) if name else None
    except OSError:
        near = None
    return "" if near is None else f" (did you mean {os.path.join(path, near)}?)"


def would_read(patterns: Iterable[str], path: Path) -> bool:
    """Whether a job with these inputs would read `path` (links resolved) once it is there."""
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
    """As a recursive glob, part by part."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[at:], pattern[1:]) for at in range(len(parts) + 1))
    return bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])


def _walk(folder: str) -> Iterable[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (os.path.join(root, n) for n in names if not n.startswith(".") and named_by(n) is not None)


def _describe(path: str, base: Path, named_format: str) -> InputFile:
    if (shown := not_utf8(path)) is not None:
        raise InputCorrupt(f"{shown}: the name of the file holds bytes that are not UTF-8; rename it")
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):  # a pipe can be read only once, and opening it may never end
            raise InputMissing(
                f"{path}: is not a regular file; write what comes from a pipe or device to a file"
            )
        form = format_of(path, named_format)
    except FileNotFoundError:
        raise InputMissing(f"{path}: there is no such file") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    return InputFile.of(path, _shown_name(path, base), form, found)


def _shown_name(path: str, base: Path) -> str:
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute, base)
    return absolute if relative.startswith("..") else relative
