"""The columns of a result that all kinds of answers have: which row it is, and how it failed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa
import pyarrow.compute as pc

HEAD = (
    ("row_id", pa.int64()),
    ("file", pa.string()),
    ("row_index", pa.int64()),
    ("custom_id", pa.string()),
    ("status", pa.string()),
)
TAIL = (
    ("error_code", pa.string()),
    ("error_class", pa.string()),
    ("error_message", pa.string()),
    ("retryable", pa.bool_()),
)

# Made once: a Python value is looked up in pandas, wherever that may be, each time that it becomes a scalar.
OK, ERROR = pa.scalar("ok"), pa.scalar("error")


def framed(*own: pa.Field) -> pa.Schema:
    """Return a result's schema with the columns of its kind in their place."""
    return pa.schema([*HEAD, *own, *TAIL])


@dataclass(frozen=True)
class Frame:
    """Rows of the index, and the completion of each, or nulls."""

    rows: pa.Table
    matched: pa.Table

    @cached_property
    def failed(self) -> pa.ChunkedArray:
        """Tell whether each row is an error row."""
        return pc.or_(
            pc.is_valid(self.rows.column("error_code")), pc.is_valid(self.matched.column("error_code"))
        )

    @cached_property
    def answered(self) -> pa.ChunkedArray:
        """Tell whether each row has an answer."""
        return pc.and_(pc.is_valid(self.matched.column("row_id")), pc.invert(self.failed))

    def when_answered(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the values, null where a row has no answer."""
        return pc.if_else(self.answered, values, pa.scalar(None, values.type))

    def around(self, **own: pa.Array) -> pa.Table:
        """Return the table of all columns, in order."""
        columns = {name: self.rows.column(name) for name in ("row_id", "file", "row_index", "custom_id")}
        columns["status"] = pc.if_else(self.failed, ERROR, OK)
        return pa.table({**columns, **own, **{name: self._either(name) for name, _ in TAIL}})

    def _either(self, name: str) -> pa.ChunkedArray:
        """Return the error of the row, or that of its completion."""
        both = pc.coalesce(self.rows.column(name), self.matched.column(name))
        return pc.if_else(self.failed, both, pa.scalar(None, both.type))
