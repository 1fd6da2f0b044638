"""An input file as the job listed it, and the check that it has not changed since."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from batchinfer.core.errors import InputCorrupt, InputMissing
from batchinfer.filesystem.durable import sha256_of
from batchinfer.filesystem.location import FileFacts, Location

QUERY = "sql"  # in the results, the file name of the rows of `input.sql`


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file, with the size, times and inode that it had when the job listed it. These reveal later changes.

    Args:
        path: The path of the file.
        name: The file's name in the results.
        format: The name of its format, such as "csv".
        size: The size in bytes.
        mtime_ns: The time of the last write, in nanoseconds since 1970.
        ctime_ns: The time of the last change of content or metadata, in nanoseconds since 1970. 0 if unknown.
        inode: The number of the file in its file system. 0 if unknown.
    """

    path: str
    name: str
    format: str
    size: int
    mtime_ns: int
    # Reveals an edit that keeps size and mtime. A copy, chmod or hard link changes it too, so the content decides.
    ctime_ns: int = 0
    inode: int = 0

    @classmethod
    def of(cls, location: Location, name: str, form: str, facts: FileFacts) -> Self:
        """Return the input file at a location.

        Args:
            location: The path of the file.
            name: The file's name in the results.
            form: The name of its format.
            facts: Its size, times and inode.
        """
        return cls(location.text, name, form, facts.size, facts.mtime_ns, facts.ctime_ns, facts.inode)

    @property
    def location(self) -> Location:
        """The path of the file as a Location."""
        return Location(self.path)

    def now(self) -> InputFile:
        """Return a copy with the file's current size, times and inode. Raises InputMissing if it is gone."""
        try:
            facts = self.location.facts()
        except FileNotFoundError:
            facts = None
        if facts is None:
            raise InputMissing(f"{self.path}: the file was there when the job began and is gone now")
        return InputFile.of(self.location, self.name, self.format, facts)

    def check_unchanged(self, sha256: str | None = None) -> None:
        """Raise InputCorrupt if the file has changed since the job listed it.

        Args:
            sha256: The digest of the bytes that were read, or None if the file was not read to its end. A file that
                still has this digest and its old size counts as unchanged.

        Raises:
            InputCorrupt: The file has changed.
            InputMissing: The file is gone.
        """
        now = self.now()
        if now == self or (now.size == self.size and sha256 and sha256_of(self.location.local) == sha256):
            return
        same = (
            ", with the same size"
            if now.size == self.size
            else f" ({self.size} bytes before, {now.size} now)"
        )
        raise InputCorrupt(
            f"{self.path}: the file changed while it was read{same}; run the job again when nothing writes to it"
        )

    def restat(self) -> InputFile:
        """Check that the file is still the listed one, and return a copy with its current size, times and inode.

        Called just before the file is read and hashed, so that `check_unchanged` detects a change while it is read.

        Raises:
            InputCorrupt: Size or mtime have changed since the file was listed.
            InputMissing: The file is gone.
        """
        now = self.now()
        if (now.size, now.mtime_ns) != (self.size, self.mtime_ns):
            self.check_unchanged()
        return now

    def to_json(self) -> dict[str, Any]:
        """Return the path, name, format, size, times and inode as a JSON object."""
        return asdict(self)
