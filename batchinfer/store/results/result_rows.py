"""Makes result rows: one per answer of an input row, in input order. The schema is known before the first row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.errors import BatchInferError
from batchinfer.filesystem.duck import working_memory
from batchinfer.store.accuracy.expected import mark_expected
from batchinfer.store.answers.parts import COMPLETION_SCHEMA, ENGINE_CLASS
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import INPUT_ROW, SAMPLE, Index
from batchinfer.store.outputs.answer_lists import group_into_lists, list_fields
from batchinfer.store.outputs.best_samples import best_samples
from batchinfer.store.outputs.registry import KINDS
from batchinfer.store.results.index_rows import IndexRows
from batchinfer.store.results.join import Join
from batchinfer.store.results.sorted_answers import SortedAnswers

# Rows that are decoded and joined together, and rows per row group. Publishing 100,000 rows of 40 tokens was equally
# fast with 1,024, 4,096 and 16,384 rows (26 to 64 thousand rows per second on two busy cores), with files of 5.5, 5.3
# and 5.3 MB. The value is small enough for long rows, and large enough for compression.
BATCH_ROWS = 4096
_ROW_ID = pa.field("row_id", pa.int64())
ATTEMPT = pa.field("attempt", pa.int32())


def result_schema(index: Index) -> pa.Schema:
    """Return the names and types of the columns of a job's result.

    Raises ValueError if a passthrough column has the same name as a column that batchinfer writes.
    """
    ours = [*KINDS[index.output].schema(index), *([ATTEMPT] if index.attempts > 1 else [])]
    ours += [SAMPLE] if index.samples else []
    ours += [ENGINE_CLASS] if index.engine_class else []
    clash = sorted(set(index.passthrough_schema.names) & {field.name for field in ours})
    if clash:
        raise ValueError(f"output.columns: {', '.join(clash)}: the result has a column of this name already")
    ours = list_fields(ours) if index.best is not None and index.best.lists else ours
    found = pa.schema([*ours, *index.passthrough_schema])  # without metadata: it may name tools and hosts
    return (
        found if index.expected is None else mark_expected(found, index.expected, index.answers is not None)
    )


class ResultRows:
    """Makes result rows from rows of the index and their completions, for given spans of index rows.

    Threads may read different spans at the same time. With `partial`, rows without a completion are left out.
    Otherwise, all rows must have one.
    """

    def __init__(
        self,
        index: Index,
        answers: SortedAnswers,
        spans: Sequence[tuple[int, int]],
        detokenizer: Detokenizer,
        partial: bool,
        attempts: NDArray[np.uint8] | None = None,
    ) -> None:
        self._attempts = attempts  # per row of the index
        self._index, self._answers, self._spans = index, answers, spans
        self._detokenizer, self._partial = detokenizer, partial
        self._kind, self._schema = KINDS[index.output], result_schema(index)
        self._batch_rows = batch_rows(index)
        self._rows = IndexRows(index)
        counts = (len(range(*span, self._batch_rows)) for span in spans)
        self._first = list(accumulate(counts, initial=0))  # number of the first batch of each span

    def tables(self, span: int) -> Iterator[pa.Table]:
        """Yield the result rows of a span in tables that have all columns of the result.

        Args:
            span: The number of the span, from 0.
        """
        first = self._spans[span][0]
        for batch, (rows, values) in enumerate(self._read(*self._spans[span]), self._first[span]):
            _check_order(rows.column("row_id").to_numpy(), first)
            matched = _matching(first, rows.num_rows, self._answers.of(batch))
            table = self._kind.table(self._index, rows, matched, self._detokenizer)
            if self._index.attempts > 1:
                table = table.append_column(ATTEMPT, self._numbers(first, matched))
            if self._index.samples:
                table = table.set_column(0, "row_id", rows.column(INPUT_ROW.name))
                table = table.append_column(SAMPLE, rows.column(SAMPLE.name))
            if self._index.engine_class:
                table = table.append_column(ENGINE_CLASS, matched.column(ENGINE_CLASS.name))
            first += rows.num_rows
            for field in self._index.passthrough_schema:
                table = table.append_column(field, values.column(field.name))
            table = table.filter(pa.array(self._published(table, rows, matched)))
            best = self._index.best
            if best is not None and best.lists:
                table = group_into_lists(table, best.published, self._index.passthrough_schema.names)
            yield table.cast(self._schema)

    def _published(self, table: pa.Table, rows: pa.Table, matched: pa.Table) -> NDArray[np.bool_]:
        marks = np.ones(len(table), np.bool_)
        best = self._index.best
        if self._partial:
            finished = pc.or_(pc.is_null(rows.column("key")), pc.is_valid(matched.column("row_id")))
            marks = finished.to_numpy(zero_copy_only=False)
        if best is not None:  # all answers to a row are in the same table
            marks = np.repeat(marks.reshape(-1, best.computed).all(axis=1), best.computed)
            marks &= best.published == best.computed or best_samples(best, table, matched)
        return marks

    def _read(self, start: int, stop: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        return self._rows.tables(start, stop, [self._batch_rows])

    def _numbers(self, first: int, matched: pa.Table) -> pa.Array:
        numbers = np.ones(matched.num_rows, np.int32)
        if self._attempts is not None:
            numbers[:] = self._attempts[first : first + len(numbers)]
        made = matched.column("row_id").is_valid().to_numpy(zero_copy_only=False)
        return pa.array(numbers, ATTEMPT.type, mask=~made)


@contextmanager
def result_rows(
    index: Index,
    join: Join,
    detokenizer: Detokenizer,
    spill: Path,
    spans: Sequence[tuple[int, int]],
    *,
    partial: bool = False,
) -> Iterator[ResultRows]:
    """Read the completions of spans of index rows, and yield a reader of result rows.

    Args:
        index: The index.
        join: The positions of the answers.
        detokenizer: Converts tokens to text.
        spill: Folder for data that exceeds the memory.
        spans: The spans of index rows, as (start, stop).
        partial: True to leave out rows without a completion.

    Raises:
        StorageError: A part cannot be read.
        BatchInferError: Completions are missing and `partial` is False.
    """
    if not partial:
        join.refuse_missing()
    size = batch_rows(index)
    starts = np.concatenate([np.arange(start, stop, size, dtype=np.int64) for start, stop in spans])
    given_by = [ENGINE_CLASS] if index.engine_class else []
    schema = pa.schema([_ROW_ID, *COMPLETION_SCHEMA, *KINDS[index.output].read(index), *given_by])
    wanted = schema.remove(schema.get_field_index("key"))
    with SortedAnswers(join.within(spans), wanted, starts, size, spill, working_memory() // 2) as answers:
        yield ResultRows(index, answers, spans, detokenizer, partial, join.attempts)


def batch_rows(index: Index) -> int:
    """Return how many index rows are converted to result rows at a time.

    It is a multiple of the number of samples per input row, so that these stay together.
    """
    rows = KINDS[index.output].batch_rows(index) or BATCH_ROWS
    if index.best is None:
        return rows
    return max(1, rows // index.best.computed) * index.best.computed


def _check_order(row_ids: NDArray[np.int64], first: int) -> None:
    if row_ids[0] != first or row_ids[-1] != first + len(row_ids) - 1:
        raise BatchInferError("the rows in the parts of the index are not in order")


def _matching(first: int, rows: int, answers: pa.Table) -> pa.Table:
    places = np.full(rows, -1, np.int64)
    places[answers.column("row_id").to_numpy() - first] = np.arange(answers.num_rows)
    return answers.take(pa.array(places, mask=places < 0)).combine_chunks()
