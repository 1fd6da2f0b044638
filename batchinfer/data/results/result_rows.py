"""Result rows: one for every input row, in input order, in a schema that is fixed before the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.errors import BatchInferError
from batchinfer.data.columns.answer_check import parsed_answer
from batchinfer.data.columns.logprob_column import COLUMN, LOGPROBS_FIELD, Detokenizer, logprob_column
from batchinfer.data.columns.schema_columns import SchemaColumns, schema_columns
from batchinfer.data.constraints.generated_schema import parsed_schema
from batchinfer.data.index.index import AnswerSchema
from batchinfer.data.results.join import FINISHED_SCHEMA, FINISHED_WITH_LOGPROBS, finished_rows
from batchinfer.data.storage.duck import Watched
from batchinfer.data.storage.rebatch import parquet_batches, rebatch

RESULT_SCHEMA = pa.schema(
    [
        ("row_id", pa.int64()),
        ("file", pa.string()),
        ("row_index", pa.int64()),
        ("custom_id", pa.string()),
        ("status", pa.string()),
        ("generated_text", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int32()),
        ("completion_tokens", pa.int32()),
        ("error_code", pa.string()),
        ("error_class", pa.string()),
        ("error_message", pa.string()),
        ("retryable", pa.bool_()),
    ]
)
# Rows decoded, joined and held at a time, and the row group of a result file. 1,024, 4,096 and 16,384 published
# 100,000 rows of 40 tokens equally fast within the noise (26 to 64 thousand rows a second on two busy cores), with
# files of 5.5, 5.3 and 5.3 MB: small enough for long rows, large enough for the compression.
BATCH_ROWS = 4096
# Instead, where rows have log-probabilities: with 20 alternatives, 128 rows of 1,000 tokens take 60 MB.
LOGPROB_ROWS = 128


# Errors of answers that were generated all the same: what there is of their text says more than the message
TEXT_IS_KEPT = ("incomplete_output", "unfit_output", "constraint_failed")


class IndexView(Protocol):
    """The part of a job's index that publishing needs."""

    @property
    def index_parts(self) -> Sequence[Path]:
        """Index parts in row order."""

    @property
    def passthrough_parts(self) -> Sequence[Path]:
        """Parts with `row_id` and the passthrough columns, in the rows of the index; empty if there are
        none.
        """

    @property
    def passthrough_schema(self) -> pa.Schema:
        """Types of the passthrough columns, without `row_id`."""

    @property
    def answers(self) -> AnswerSchema | None:
        """Return the schema of answers; None if the result has no columns of their parts."""

    @property
    def logprobs(self) -> int | None:
        """The most log-probabilities a token that a row asks for; None: the result has no column for them."""

    @property
    def rows(self) -> int:
        """Rows of the input, bad ones included."""


def answer_columns(answers: AnswerSchema | None) -> SchemaColumns | None:
    """The columns of answers with that schema. Raises NoColumns."""
    return None if answers is None else schema_columns(parsed_schema(answers.text), answers.column)


def result_schema(index: IndexView) -> pa.Schema:
    """The schema of a result. Raises ValueError when a passthrough column has the name of one of ours."""
    ours = RESULT_SCHEMA if index.logprobs is None else RESULT_SCHEMA.append(LOGPROBS_FIELD)
    if (columns := answer_columns(index.answers)) is not None:
        ours = pa.schema([*ours, *columns.schema])
    clash = sorted(set(index.passthrough_schema.names) & set(ours.names))
    if clash:
        raise ValueError(f"output.columns: {', '.join(clash)}: the result has a column of this name already")
    return pa.schema([*ours, *index.passthrough_schema])  # without metadata: it may name tools and hosts


def result_tables(
    index: IndexView,
    completion_parts: Sequence[Path],
    detokenizer: Detokenizer,
    spill: Path,
    *,
    partial: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> Iterator[pa.Table]:
    """The result in tables of at most BATCH_ROWS rows, LOGPROB_ROWS with log-probabilities, in `result_schema`.

    A row whose key has no completion is left out with `partial`, and a BatchInferError without.
    """
    plain = index.logprobs is None
    schema, stored = result_schema(index), FINISHED_SCHEMA if plain else FINISHED_WITH_LOGPROBS
    batch_rows = BATCH_ROWS if plain else LOGPROB_ROWS
    found = finished_rows(
        index.index_parts,
        completion_parts,
        spill,
        memory_limit=memory_limit,
        threads=threads,
        batch_rows=batch_rows,
        schema=stored,
        watched=watched,
    )
    finished, columns = _Finished(found, stored), answer_columns(index.answers)
    for rows, passthrough in _zipped(index, batch_rows):
        matched = finished.matching(rows.column("row_id").to_numpy())
        table = _result_table(rows, matched, detokenizer)
        if columns is not None:
            table = _with_answers(table, columns)
        for field in index.passthrough_schema:
            table = table.append_column(field, passthrough.column(field.name))
        missing = pc.and_(pc.is_valid(rows.column("key")), pc.is_null(matched.column("row_id")))
        if pc.any(missing).as_py():
            if not partial:
                raise BatchInferError(
                    f"{pc.sum(missing).as_py()} rows have no completion yet: nothing published"
                )
            table = table.filter(pc.invert(missing))
        yield table.cast(schema)
    finished.close()


def _zipped(index: IndexView, batch_rows: int) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Index rows and their passthrough values, side by side."""
    rows = rebatch(parquet_batches(index.index_parts, batch_rows), batch_rows)
    if not len(index.passthrough_schema):
        yield from ((table, table) for table in rows)
        return
    values = rebatch(parquet_batches(index.passthrough_parts, batch_rows), batch_rows)
    for row, value in zip(rows, values, strict=True):
        if not row.column("row_id").equals(value.column("row_id")):
            raise BatchInferError("index and passthrough parts do not hold the same rows")
        yield row, value


class _Finished:
    """The stream of finished rows, read along with the index."""

    def __init__(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> None:
        self._batches = batches
        self._held = schema.empty_table()

    def matching(self, row_ids: NDArray[np.int64]) -> pa.Table:
        """A table as long as `row_ids` (ascending): each row's completion, or nulls."""
        self._read_through(int(row_ids[-1]))
        held = self._held.column("row_id").to_numpy()
        count = int(np.searchsorted(held, row_ids[-1], side="right"))
        places = np.full(len(row_ids), -1, np.int64)
        places[np.searchsorted(row_ids, held[:count])] = np.arange(count)
        matched = self._held.take(pa.array(places, mask=places < 0))
        self._held = self._held.slice(count)
        return matched.combine_chunks()

    def close(self) -> None:
        """Drain the stream, so that the database behind it closes."""
        for _ in self._batches:
            raise BatchInferError("the store's join has more rows than the index")

    def _read_through(self, row_id: int) -> None:
        while not self._held.num_rows or self._held.column("row_id")[-1].as_py() < row_id:
            batch = next(self._batches, None)
            if batch is None:
                return
            self._held = pa.concat_tables([self._held, pa.Table.from_batches([batch])]).combine_chunks()


def _result_table(rows: pa.Table, matched: pa.Table, detokenizer: Detokenizer) -> pa.Table:
    failed = pc.or_(pc.is_valid(rows.column("error_code")), pc.is_valid(matched.column("error_code")))
    answered = pc.and_(pc.is_valid(matched.column("row_id")), pc.invert(failed))

    told = pc.or_(answered, pc.is_in(matched.column("error_code"), pa.array(TEXT_IS_KEPT)))

    def when_answered(values: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.if_else(answered, values, pa.scalar(None, values.type))

    def either(name: str) -> pa.ChunkedArray:
        return pc.if_else(failed, pc.coalesce(rows.column(name), matched.column(name)), None)

    columns = {name: rows.column(name) for name in ("row_id", "file", "row_index", "custom_id")}
    columns |= {
        "status": pc.if_else(failed, "error", "ok"),
        "generated_text": _texts(matched, told.to_numpy(), detokenizer),
        "finish_reason": when_answered(matched.column("finish_reason")),
        "prompt_tokens": rows.column("token_count"),
        "completion_tokens": when_answered(pc.list_value_length(matched.column("token_ids"))),
        **{name: either(name) for name in ("error_code", "error_class", "error_message", "retryable")},
    }
    table = pa.table(columns).cast(RESULT_SCHEMA)
    if COLUMN not in matched.column_names:
        return table
    return table.append_column(LOGPROBS_FIELD, logprob_column(matched, answered.to_numpy(), detokenizer))


def _with_answers(table: pa.Table, columns: SchemaColumns) -> pa.Table:
    """The table with the parts of its answers, null where a row has none."""
    whole = pc.equal(table.column("status"), "ok").to_numpy(zero_copy_only=False)
    texts = table.column("generated_text").to_pylist()
    answers = [
        parsed_answer(text) if ok and text is not None else None
        for text, ok in zip(texts, whole, strict=True)
    ]
    for field, array in zip(columns.schema, columns.arrays(answers), strict=True):
        table = table.append_column(field, array)
    return table


def _texts(matched: pa.Table, answered: NDArray[np.bool_], detokenizer: Detokenizer) -> pa.Array:
    """The text of every answered row, cut where a stop string ended it; null elsewhere."""
    places = np.flatnonzero(answered)
    chosen = matched.take(pa.array(places)).combine_chunks()
    texts: list[str | None] = [None] * len(answered)
    if len(places):
        decoded = detokenizer.decode_batch(_token_lists(chosen.column("token_ids").chunk(0)))
        limits = chosen.column("text_length").to_pylist()
        for place, text, limit in zip(places.tolist(), decoded, limits, strict=True):
            texts[place] = text if limit is None else text[:limit]
    return pa.array(texts, pa.string())


def _token_lists(column: pa.ListArray) -> list[Sequence[int]]:
    tokens = column.flatten().to_numpy().tolist()
    ends = np.cumsum(column.value_lengths().fill_null(0).to_numpy()).tolist()
    return [tokens[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
