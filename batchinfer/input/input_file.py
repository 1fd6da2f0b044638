"""One input file as it was when the job listed it, and whether it is still the same."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

from batchinfer.core.errors import InputCorrupt, InputMissing
from batchinfer.filesystem.durable import sha256_of
from batchinfer.filesystem.location import FileFacts, Location

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
    def of(cls, location: Location, name: str, form: str, facts: FileFacts) -> Self:
        return cls(location.text, name, form, facts.size, facts.mtime_ns, facts.ctime_ns, facts.inode)

    @property
    def location(self) -> Location:
        """Return where the file is."""
        return Location(self.path)

    def now(self) -> InputFile:
        """The file as it is now. Raises InputMissing when it is gone."""
        try:
            facts = self.location.facts()
        except FileNotFoundError:
            facts = None
        if facts is None:
            raise InputMissing(f"{self.path}: the file was there when the job began and is gone now")
        return InputFile.of(self.location, self.name, self.format, facts)

    def check_unchanged(self, sha256: str | None = None) -> None:
        """Raises InputCorrupt when the file is another than at listing, InputMissing when it is gone.

        `sha256` is that of what was read, where all was: a file with that content is the same.
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
