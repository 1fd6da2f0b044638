"""The columns that results of all kinds of answers have: the position of the row, and its error."""

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

# Created once: converting a Python value to a scalar checks for pandas each time
OK, ERROR = pa.scalar("ok"), pa.scalar("error")


def frame_schema(*own: pa.Field) -> pa.Schema:
    """Return the columns of a result with answers in the columns `own`.

    Columns that all results have, such as row_id and status, come before `own`; the columns of errors come
    last.
    """
    return pa.schema([*HEAD, *own, *TAIL])


@dataclass(frozen=True)
class Frame:
    """Rows of the index, each with its completion: the input of one batch of result rows.

    Attributes:
        rows: Rows of the index.
        matched: For each row the columns of its completion in the store, or nulls if it has none.
    """

    rows: pa.Table
    matched: pa.Table

    @cached_property
    def failed(self) -> pa.ChunkedArray:
        """Return a boolean per row: True if the row of the index or its completion is an error."""
        return pc.or_(
            pc.is_valid(self.rows.column("error_code")), pc.is_valid(self.matched.column("error_code"))
        )

    @cached_property
    def answered(self) -> pa.ChunkedArray:
        """Return a boolean per row: True if it has a completion, and no error."""
        return pc.and_(pc.is_valid(self.matched.column("row_id")), pc.invert(self.failed))

    def when_answered(self, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return a result column with the given values, one per row, but null for rows without an answer."""
        return pc.if_else(self.answered, values, pa.scalar(None, values.type))

    def result_table(self, **own: pa.Array) -> pa.Table:
        """Return a result table with the columns `own` of answers.

        Columns that all results have, such as row_id and status, come before `own`; the columns of errors
        come last.
        """
        columns = {name: self.rows.column(name) for name in ("row_id", "file", "row_index", "custom_id")}
        columns["status"] = pc.if_else(self.failed, ERROR, OK)
        return pa.table({**columns, **own, **{name: self._either(name) for name, _ in TAIL}})

    def _either(self, name: str) -> pa.ChunkedArray:
        # An error of the index row takes precedence over an error of its completion
        both = pc.coalesce(self.rows.column(name), self.matched.column(name))
        return pc.if_else(self.failed, both, pa.scalar(None, both.type))
