"""Locations of user data. Currently a location is a path on a local disk.

Readers and writers of user data use locations. The state folder and scratch files are always local paths.
"""

from __future__ import annotations

import glob
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchinfer.core.text import nearest


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Properties of a file that show if it changed: size in bytes, Unix times in ns, and inode."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


@dataclass(frozen=True, slots=True, order=True)
class Location:
    """The location of a file or folder of user data, or a glob pattern of locations.

    Methods raise OSError, including FileNotFoundError.

    Attributes:
        text: The text in the job file or on the command line, which messages show.
    """

    text: str

    @classmethod
    def at(cls, path: Path) -> Location:
        """Return the location of a local path."""
        return cls(str(path))

    def __str__(self) -> str:
        return self.text

    def __truediv__(self, name: str) -> Location:
        return Location(os.path.join(self.text, name))

    @property
    def name(self) -> str:
        """Return the last part of the location."""
        return os.path.basename(self.text)

    @property
    def local(self) -> Path:
        """Return the location as a local path, for a library that opens files itself."""
        return Path(self.text)

    @property
    def is_folder(self) -> bool:
        """Return True if there is a folder at the location."""
        return os.path.isdir(self.text)

    @property
    def exists(self) -> bool:
        """Return True if there is anything at the location, even a broken link."""
        return os.path.lexists(self.text)

    @property
    def is_pattern(self) -> bool:
        """Return True if the location's text has glob wildcards."""
        return glob.has_magic(self.text)

    @property
    def is_file(self) -> bool:
        """Return True if there is a regular file at the location."""
        return os.path.isfile(self.text)

    def names(self) -> list[str]:
        """Return the names of the files and folders in the folder at the location."""
        return os.listdir(self.text)

    def open(self) -> BinaryIO:
        """Open the file at the location for reading."""
        return open(self.text, "rb")

    def facts(self) -> FileFacts | None:
        """Return size, times and inode of the file at the location, or None for a folder, pipe or device."""
        found = os.stat(self.text)
        if not stat.S_ISREG(found.st_mode):
            return None
        return FileFacts(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def files_below(self, wanted: Callable[[str], bool]) -> list[Location]:
        """Return the files in the folder at the location and its subfolders, sorted. Hidden ones are left out.

        Args:
            wanted: Returns True for the names of files to return.
        """
        return sorted(self._walk(wanted))

    def _walk(self, wanted: Callable[[str], bool]) -> Iterator[Location]:
        for root, folders, names in os.walk(self.text):
            folders[:] = [name for name in folders if not name.startswith(".")]
            found = (name for name in names if not name.startswith(".") and wanted(name))
            yield from (Location(os.path.join(root, name)) for name in found)

    def matching(self) -> list[Location]:
        """Return the files that match the location's pattern, sorted."""
        return sorted(Location(path) for path in glob.glob(self.text, recursive=True) if os.path.isfile(path))

    def relative_to(self, base: Path) -> str:
        """Return the path relative to the folder `base`, or the absolute path if it is not below the folder."""
        absolute = os.path.abspath(self.text)
        relative = os.path.relpath(absolute, base)
        return absolute if relative.startswith("..") else relative

    def nearest(self) -> Location | None:
        """Return the existing file or folder with the most similar path, or None if there is none.

        It is for messages about a location that matches nothing: "did you mean …?"
        """
        path, name = self._fixed if self.is_pattern else self.text, ""
        while not os.path.isdir(path):
            path, name = os.path.split(path)
        try:
            near = nearest(name, sorted(os.listdir(path))) if name else None
        except OSError:
            near = None
        return None if near is None else Location(os.path.join(path, near))

    @property
    def _fixed(self) -> str:
        parts = Path(self.text).parts
        return str(Path(*itertools.takewhile(lambda part: not glob.has_magic(part), parts)))
