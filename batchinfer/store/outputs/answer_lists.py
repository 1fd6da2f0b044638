"""Combines several answers to a row into one row of a result, with lists as columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.store.columns.prompt_logprob_column import PROMPT_COLUMN
from batchinfer.store.outputs.frame import HEAD, TAIL

_STATUS = "status"
_ERRORS = tuple(name for name, _ in TAIL)  # taken from the first failed answer
_OF_PROMPT = (PROMPT_COLUMN,)  # taken from the first answer that has it; all have the same prompt
_OF_ROW = (*(name for name, _ in HEAD), "prompt_tokens", *_ERRORS, *_OF_PROMPT)  # columns without lists


def list_fields(fields: Sequence[pa.Field]) -> list[pa.Field]:
    """Return the result columns for several answers per row, given the columns for one answer per row.

    They become lists, except columns of the whole row, such as its position and error.
    """
    return [one if one.name in _OF_ROW else pa.field(one.name, pa.list_(one.type)) for one in fields]


def group_into_lists(table: pa.Table, answers: int, carried: Collection[str]) -> pa.Table:
    """Combine the answers to each input row into one result row, whose columns are lists.

    The row has the status ok if any of its answers is ok. Otherwise it has the error of its first failed
    answer.

    Args:
        table: One row per answer; the answers to an input row are consecutive.
        answers: Number of answers per input row.
        carried: Names of columns of the input, which do not become lists.
    """
    firsts = np.arange(0, table.num_rows, answers, dtype=np.int64)
    failed = pc.equal(table.column(_STATUS), "error").to_numpy(zero_copy_only=False).reshape(-1, answers)
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    for name in table.schema.names:
        column = table.column(name)
        if name == _STATUS:
            columns[name] = pa.array(np.where(failed.all(axis=1), "error", "ok"), pa.string())
        elif name in _ERRORS:
            columns[name] = column.take(_first(firsts, failed))
        elif name in _OF_PROMPT:
            there = column.is_valid().to_numpy(zero_copy_only=False).reshape(-1, answers)
            columns[name] = column.take(_first(firsts, there))
        elif name in _OF_ROW or name in carried:
            columns[name] = column.take(pa.array(firsts))
        else:
            columns[name] = _lists(column, answers)
    return pa.table(columns)


def _first(firsts: NDArray[np.int64], marks: NDArray[np.bool_]) -> pa.Array:
    return pa.array(firsts + marks.argmax(axis=1), mask=~marks.any(axis=1))


def _lists(column: pa.ChunkedArray, answers: int) -> pa.ListArray:
    values = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    ends = np.arange(0, len(values) + 1, answers, dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), values)
