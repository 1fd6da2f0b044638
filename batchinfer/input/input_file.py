"""One input file as it was when the job listed it, and whether it is still the same."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from batchinfer.core.errors import InputCorrupt, InputMissing
from batchinfer.filesystem.durable import sha256_of

QUERY = "sql"  # the name of the rows of a query, which the job itself made


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file as it was when it was listed. `name` is what the results call it, `format` a format's name.

    No program can set ctime, so an edit shows there when size and mtime are as before. But it also changes with what
    leaves the content alone (a copy, chmod, a hard link): where only ctime, mtime or inode differ, content decides.
    """

    path: str
    name: str
    format: str
    size: int
    mtime_ns: int
    ctime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, path: str, name: str, form: str, found: os.stat_result) -> Self:
        return cls(path, name, form, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)

    def now(self) -> InputFile:
        """The file as it is now. Raises InputMissing when it is gone."""
        try:
            return InputFile.of(self.path, self.name, self.format, os.stat(self.path))
        except FileNotFoundError:
            raise InputMissing(
                f"{self.path}: the file was there when the job began and is gone now"
            ) from None

    def check_unchanged(self, sha256: str | None = None) -> None:
        """Raises InputCorrupt when the file is another than at listing, InputMissing when it is gone.

        `sha256` is that of what was read, where all was: a file with that content is the same.
        """
        now = self.now()
        if now == self or (now.size == self.size and sha256 and sha256_of(Path(self.path)) == sha256):
            return
        same = (
            ", with the same size"
            if now.size == self.size
            else f" ({self.size} bytes before, {now.size} now)"
        )
        raise InputCorrupt(
            f"{self.path}: the file changed while it was read{same}; run the job again when nothing writes to it"
        )

    def opened(self) -> InputFile:
        """The file as it is before its content is read: its digest will be taken after that.

        Raises InputCorrupt when size or mtime are others than at listing.
        """
        now = self.now()
        if (now.size, now.mtime_ns) != (self.size, self.mtime_ns):
            self.check_unchanged()
        return now

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
