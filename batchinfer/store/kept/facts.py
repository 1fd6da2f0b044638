"""Totals over all rows of a segment, which the index needs in addition to its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

MOST_NAMES = 200  # maximum number of column names


@dataclass(slots=True)
class SegmentFacts:
    """Totals over the rows of a segment of the kept index. A run that reuses the segment needs them.

    Attributes:
        files: Number of input files. All rows of a file belong to the same segment.
        rows: Number of rows.
        read: Number of rows that could be read.
        tokens: Number of tokens of all prompts.
        names: The first column names of the rows, at most MOST_NAMES, in order.
        found: The required columns that occurred in rows.
        kinds: For each passthrough column, the kinds of its values.
        logprobs: Maximum log-probabilities per token that a row requests. None: no row requests any.
        prompt_logprobs: True if a row requests log-probabilities of its prompt.
        tools: True if a row has tools.
        plain: True if no row causes a notice to the user or needs another attempt in the next run.
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
        """Add the columns that occurred in some rows to the totals.

        Args:
            names: Column names of the rows, in order.
            found: The required columns that occurred.
            kinds: For each passthrough column, the kinds of its values.
        """
        if len(self.names) < MOST_NAMES:
            self.names.update(dict.fromkeys(names))
        self.found |= found
        self.kinds = self.kinds or [set() for _ in kinds]
        for all_of_them, some in zip(self.kinds, kinds, strict=True):
            all_of_them |= some

    def to_json(self) -> bytes:
        """Return the totals over a segment's rows as JSON bytes."""
        lists = {"names": [*self.names], "found": sorted(self.found), "kinds": [*map(sorted, self.kinds)]}
        return json.dumps(asdict(self) | lists).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the totals over a segment's rows from the JSON bytes that `to_json` wrote.

        Raises ValueError, KeyError or TypeError if they are damaged.
        """
        value: dict[str, Any] = json.loads(data)
        value["names"] = dict.fromkeys(value["names"])
        value["found"] = set(value["found"])
        value["kinds"] = [set(kinds) for kinds in value["kinds"]]
        return cls(**value)
