"""One input file as it was when the job listed it, and whether it is still the same."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from typing import Any

from batchinfer.errors import InputCorrupt, InputMissing


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
