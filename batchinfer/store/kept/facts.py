"""An index knows some things of all rows of a segment together, beside what it knows of each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

MOST_NAMES = 200  # of columns that are remembered


@dataclass(slots=True)
class SegmentFacts:
    """The facts of some rows. `files` are the input files that the rows are of, all of each; `tokens` those of all
    prompts; `read` rows could be read.

    `names` are the first columns that rows had, `found` those of them that were looked for; `kinds` are those of the
    values of each carried column. `plain`: nothing of these rows is to be told or made anew each night.
    """

    files: int = 0
    rows: int = 0
    read: int = 0
    tokens: int = 0
    names: dict[str, None] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    kinds: list[set[str]] = field(default_factory=list)
    logprobs: int | None = None
    prompt_logprobs: bool = False
    tools: bool = False
    plain: bool = True

    def note_columns(self, names: Sequence[str], found: set[str], kinds: Sequence[set[str]]) -> None:
        """Add what the columns of some rows are."""
        if len(self.names) < MOST_NAMES:
            self.names.update(dict.fromkeys(names))
        self.found |= found
        self.kinds = self.kinds or [set() for _ in kinds]
        for all_of_them, some in zip(self.kinds, kinds, strict=True):
            all_of_them |= some

    def to_json(self) -> bytes:
        lists = {"names": [*self.names], "found": sorted(self.found), "kinds": [*map(sorted, self.kinds)]}
        return json.dumps(asdict(self) | lists).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Raises ValueError, KeyError, TypeError for what is none."""
        value: dict[str, Any] = json.loads(data)
        value["names"] = dict.fromkeys(value["names"])
        value["found"] = set(value["found"])
        value["kinds"] = [set(kinds) for kinds in value["kinds"]]
        return cls(**value)
