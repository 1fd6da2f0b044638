"""Result rows: one for every input row, in input order, in a schema that is fixed before the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.embedding import Embedding
from batchinfer.core.errors import BatchInferError
from batchinfer.core.reasoning import Reasoning
from batchinfer.core.scoring import Scoring
from batchinfer.core.tool_calls import CallStyle
from batchinfer.data.accuracy.expected import marked
from batchinfer.data.columns.logprob_column import Detokenizer
from batchinfer.data.index.index import OPENING, TOOLS, AnswerSchema
from batchinfer.data.outputs.frame import HEAD, TAIL
from batchinfer.data.outputs.registry import KINDS
from batchinfer.data.results.join import Join
from batchinfer.data.results.sorted_answers import SortedAnswers
from batchinfer.data.storage.duck import working_memory
from batchinfer.data.storage.parquet_rows import ParquetRows
from batchinfer.data.storage.rebatch import rebatch
from batchinfer.data.store.parts import COMPLETION_SCHEMA

# Rows decoded, joined and held at a time, and the row group of a result file. 1,024, 4,096 and 16,384 published
# 100,000 rows of 40 tokens equally fast within the noise (26 to 64 thousand rows a second on two busy cores), with
# files of 5.5, 5.3 and 5.3 MB: small enough for long rows, large enough for the compression.
BATCH_ROWS = 4096
_ROW_ID = pa.field("row_id", pa.int64())
ATTEMPT = pa.field("attempt", pa.int32())
SAMPLE = pa.field("sample_index", pa.int32())  # which of its row's answers a row has
# The columns of the index that results are made of
_READ = [*(name for name, _ in HEAD if name != "status"), "key", "token_count", *(name for name, _ in TAIL)]


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
    def reasoning(self) -> Reasoning | None:
        """How answers mark their reasoning; None: the result has no columns for it."""

    @property
    def tool_calls(self) -> CallStyle | None:
        """How answers write calls of tools; None: the result has no column for them."""

    @property
    def embedding(self) -> Embedding | None:
        """The vectors that the rows ask for; None: their answers are no vectors."""

    @property
    def scoring(self) -> Scoring | None:
        """Return what is scored behind the rows' prompts; None: nothing is."""

    @property
    def expected(self) -> str | None:
        """The passthrough column with the values that answers should have; None: there is none."""

    @property
    def output(self) -> str:
        """The name of the kind of answers."""

    @property
    def attempts(self) -> int:
        """How many times a row may run; the result has a column for it where that is more than once."""

    @property
    def samples(self) -> int:
        """How many rows of the index, one after the other, are a row of the input."""

    @property
    def rows(self) -> int:
        """Rows of the index, bad ones included."""


def result_schema(index: IndexView) -> pa.Schema:
    """The schema of a result. Raises ValueError when a passthrough column has the name of one of ours."""
    ours = [*KINDS[index.output].schema(index), *([ATTEMPT] if index.attempts > 1 else [])]
    ours += [SAMPLE] if index.samples > 1 else []
    clash = sorted(set(index.passthrough_schema.names) & {field.name for field in ours})
    if clash:
        raise ValueError(f"output.columns: {', '.join(clash)}: the result has a column of this name already")
    found = pa.schema([*ours, *index.passthrough_schema])  # without metadata: it may name tools and hosts
    return found if index.expected is None else marked(found, index.expected, index.answers is not None)


class ResultRows:
    """The rows of a result by spans, each from a row to another. Several threads may make them, each other spans.

    A row whose key has no completion is left out with `partial`; without, there is none.
    """

    def __init__(
        self,
        index: IndexView,
        answers: SortedAnswers,
        spans: Sequence[tuple[int, int]],
        detokenizer: Detokenizer,
        partial: bool,
        attempts: NDArray[np.uint8] | None = None,
    ) -> None:
        self._attempts = attempts  # by row
        self._index, self._answers, self._spans = index, answers, spans
        self._detokenizer, self._partial = detokenizer, partial
        self._kind, self._schema = KINDS[index.output], result_schema(index)
        self._batch_rows = batch_rows(index)
        self._rows = ParquetRows(index.index_parts)
        self._values = ParquetRows(index.passthrough_parts if len(index.passthrough_schema) else ())
        counts = (len(range(*span, self._batch_rows)) for span in spans)
        self._first = list(accumulate(counts, initial=0))  # batch of each span

    def tables(self, span: int) -> Iterator[pa.Table]:
        """Yield the rows of a span in tables of at most `batch_rows`, in `result_schema`."""
        first = self._spans[span][0]
        for batch, (rows, values) in enumerate(self._zipped(*self._spans[span]), self._first[span]):
            _check_order(rows.column("row_id").to_numpy(), first)
            matched = _matching(first, rows.num_rows, self._answers.of(batch))
            table = self._kind.table(self._index, rows, matched, self._detokenizer)
            if self._index.attempts > 1:
                table = table.append_column(ATTEMPT, self._numbers(first, matched))
            if self._index.samples > 1:
                table = _of_samples(table, self._index.samples)
            first += rows.num_rows
            for field in self._index.passthrough_schema:
                table = table.append_column(field, values.column(field.name))
            if self._partial:
                finished = pc.or_(pc.is_null(rows.column("key")), pc.is_valid(matched.column("row_id")))
                table = table.filter(finished)
            yield table.cast(self._schema)

    def _numbers(self, first: int, matched: pa.Table) -> pa.Array:
        """Return the number of the attempt that each row's completion is of; null where it has none."""
        numbers = np.ones(matched.num_rows, np.int32)
        if self._attempts is not None:
            numbers[:] = self._attempts[first : first + len(numbers)]
        made = matched.column("row_id").is_valid().to_numpy(zero_copy_only=False)
        return pa.array(numbers, ATTEMPT.type, mask=~made)

    def _zipped(self, start: int, stop: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """Yield rows of the index and their passthrough values, side by side."""
        size = self._batch_rows
        read = [*_READ, *([] if self._index.reasoning is None else [OPENING.name])]
        read += [] if self._index.tool_calls is None else [TOOLS.name]
        rows = rebatch(self._rows.batches(start, stop, size, read), size)
        if not len(self._index.passthrough_schema):
            yield from ((table, table) for table in rows)
            return
        values = rebatch(self._values.batches(start, stop, size), size)
        for row, value in zip(rows, values, strict=True):
            if not row.column("row_id").equals(value.column("row_id")):
                raise BatchInferError("index and passthrough parts do not hold the same rows")
            yield row, value


@contextmanager
def result_rows(
    index: IndexView,
    join: Join,
    detokenizer: Detokenizer,
    spill: Path,
    spans: Sequence[tuple[int, int]],
    *,
    partial: bool = False,
) -> Iterator[ResultRows]:
    """Read the answers of the spans' rows; the rows can be made within the block. The folder `spill` has what is too
    large for memory. Raises StorageError, and BatchInferError where completions are missing that are not `partial`."""
    if join.missing and not partial:
        raise BatchInferError(f"{join.missing} rows have no completion yet: nothing published")
    size = batch_rows(index)
    starts = np.concatenate([np.arange(start, stop, size, dtype=np.int64) for start, stop in spans])
    schema = pa.schema([_ROW_ID, *COMPLETION_SCHEMA, *KINDS[index.output].read(index)])
    wanted = schema.remove(schema.get_field_index("key"))
    with SortedAnswers(join, wanted, starts, size, spill, working_memory() // 2) as answers:
        yield ResultRows(index, answers, spans, detokenizer, partial, join.attempts)


def _of_samples(table: pa.Table, samples: int) -> pa.Table:
    """Return the table with the ids of the input's rows, and which sample of its row each is."""
    numbers = table.column("row_id").to_numpy()
    table = table.set_column(0, "row_id", pa.array(numbers // samples))
    return table.append_column(SAMPLE, pa.array((numbers % samples).astype(np.int32)))


def batch_rows(index: IndexView) -> int:
    """Return how many rows are made at a time."""
    return KINDS[index.output].batch_rows(index) or BATCH_ROWS


def _check_order(row_ids: NDArray[np.int64], first: int) -> None:
    if row_ids[0] != first or row_ids[-1] != first + len(row_ids) - 1:
        raise BatchInferError("the parts of the index do not hold its rows in order")


def _matching(first: int, rows: int, answers: pa.Table) -> pa.Table:
    """Return a table of that many rows from row `first` on: each row's completion, or nulls."""
    places = np.full(rows, -1, np.int64)
    places[answers.column("row_id").to_numpy() - first] = np.arange(answers.num_rows)
    return answers.take(pa.array(places, mask=places < 0)).combine_chunks()
