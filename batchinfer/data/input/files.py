"""Which files a job reads, how they are named in the results, and whether they are still the same."""

from __future__ import annotations

import fnmatch
import glob
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchinfer.data.input.registry import format_of, known_suffixes, named_by
from batchinfer.errors import InputCorrupt, InputMissing, StorageError


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was when it was listed. `name` is what the results call it, `format` a format's name."""

    path: str
    name: str
    format: str
    size: int
    mtime_ns: int

    def check_unchanged(self) -> None:
        """Raises InputCorrupt when size or time differ from those at listing, InputMissing when it is gone."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            raise InputMissing(
                f"{self.path}: the file was there when the job began and is gone now"
            ) from None
        if (now.st_size, now.st_mtime_ns) != (self.size, self.mtime_ns):
            raise InputCorrupt(
                f"{self.path}: the file changed while it was read ({self.size} bytes before, {now.st_size} now); "
                "run the job again when nothing writes to it"
            )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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
                "(JSON lines and CSV also with .gz, .zst)"
            )
        return found
    if os.path.lexists(entry):
        return [entry]
    if not glob.has_magic(entry):
        raise InputMissing(f"{entry}: there is no such file")
    found = sorted(p for p in glob.glob(entry, recursive=True) if os.path.isfile(p))
    if not found:
        raise InputMissing(f"{entry}: the pattern matches no file")
    return found


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
    return InputFile(path, _shown_name(path, base), form, found.st_size, found.st_mtime_ns)


def _shown_name(path: str, base: Path) -> str:
    absolute = os.path.abspath(path)
    relative = os.path.relpath(absolute, base)
    return absolute if relative.startswith("..") else relative
