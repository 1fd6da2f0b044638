"""Writes batches of prepared rows as index rows and tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from batchinfer.core.request import RowError
from batchinfer.core.sampling import SamplingParams
from batchinfer.filesystem.durable import FileOps
from batchinfer.filesystem.part_writer import PartWriter
from batchinfer.filesystem.rebatch import repeat_values
from batchinfer.input.prompts.arguments.unread import UnreadArguments
from batchinfer.input.prompts.keys import KEY_BYTES
from batchinfer.input.prompts.prepared.rows import FurtherPrompts, OwnTexts, PreparedPrompts, PreparedRows
from batchinfer.input.prompts.row_facts import RowFacts
from batchinfer.store.index.even_batches import BATCH_ROWS, MOST_ROWS, EvenBatches
from batchinfer.store.index.index import (
    DIMENSIONS,
    INPUT_ROW,
    LABELS,
    OPENING,
    SAMPLE,
    TOOLS,
    Layout,
    attempt_columns,
    distinct_columns,
)
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.index.token_store import TokenStore, TokenWriter

_TEXT_BYTES = 1 << 20  # of parameters or tools per batch of rows
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """The position of consecutive rows in the input.

    Attributes:
        file: Their file.
        first_row: The number of the first of these rows in the file, from 0.
    """

    file: str
    first_row: int


@dataclass(frozen=True, slots=True)
class RowsSoFar:
    """The index of the rows that were read so far.

    Attributes:
        parts: The Parquet parts of the index, in row order.
        rows: Number of rows.
        error_rows: Number of error rows.
        logprobs: Maximum log-probabilities per token that a row requests. None: no row requests any.
        tokens: The prompts of the rows.
    """

    parts: tuple[Path, ...]
    rows: int
    error_rows: int
    logprobs: int | None
    tokens: TokenStore


class IndexWriter:
    """Writes the Parquet parts of an index, and the file with the tokens of its prompts.

    A context manager: call `commit()` at the end. Rows are numbered in the order of `append`.
    """

    def __init__(
        self,
        layout: Layout,
        max_model_len: int,
        schema: pa.Schema,
        ops: FileOps,
        attempts: int = 1,
        reused: ReusedRows = NO_REUSED_ROWS,
    ) -> None:
        """Create the files of an index.

        Args:
            layout: The paths of the files.
            max_model_len: Maximum tokens of a prompt and its answer.
            schema: The columns of the index, see `index_schema`.
            ops: File operations.
            attempts: Maximum attempts per row.
            reused: Rows of the last run, whose parts are already in the folder. New rows are numbered after
                them.
        """
        self._layout, self._max_model_len, self._schema, self._ops = layout, max_model_len, schema, ops
        self._attempts = attempts
        distinct = distinct_columns(attempts)
        self._parts = PartWriter(layout.index, self._schema, ops, distinct=distinct, before=reused.parts)
        self._even = EvenBatches(self._parts, self._schema)
        self._tokens = TokenWriter(layout.tokens, ops)
        self.rows = self.input_rows = reused.rows
        self.most_samples = 1  # per input row
        self.error_rows = reused.errors
        self.unread = UnreadArguments()
        self.has_tools = any(facts.tools for facts in reused.facts) and LABELS.name not in schema.names
        # Tokens of all prompts, including known rows, whose tokens are not in the token store
        self.total_tokens = sum(facts.tokens for facts in reused.facts)
        self.known_rows = reused.rows - reused.errors
        asked = [facts.logprobs for facts in reused.facts if facts.logprobs is not None]
        # Maximum per token of any row; None: no row requests any
        self.logprobs = max(asked) if asked else None
        self.prompt_logprobs = any(facts.prompt_logprobs for facts in reused.facts)
        # Whether a row asks for a vector, and says how long it is
        self.has_vectors = self.own_dimensions = False

    def append(self, place: RowPlace, rows: PreparedRows, times: Int64s) -> None:
        """Write the prepared rows of a chunk to the index.

        Args:
            place: The position of the rows in the input.
            rows: The prepared rows.
            times: For each input row, the number of its index rows, one per answer.
        """
        for batch in self._batches(place, rows, times):
            self._even.append(batch)
        self._count(rows.prompts, times)

    def _batches(self, place: RowPlace, rows: PreparedRows, times: Int64s) -> Iterator[pa.RecordBatch]:
        done, ends = rows.prompts, np.cumsum(times)
        there = done.tokens_there()
        starts = self._tokens.append(done.tokens) + np.cumsum(there) - there
        further = _Further.of(done.further, self._tokens)
        params = [SamplingParams.from_json(text) for text in done.params]
        self._note_params(params)
        self.own_dimensions |= done.dimensions is not None
        self.has_tools |= bool(done.own_texts.texts) and LABELS.name not in self._schema.names
        for first, stop in _row_ranges(ends, self._at_once(done)):
            size, own = stop - first, times[first:stop]
            columns = _work_columns(done, params, starts, slice(first, stop), self._max_model_len)
            columns |= _rung_columns(done, slice(first, stop), self._max_model_len)
            columns |= _error_columns(done.errors, first, size)
            columns |= _fact_columns(rows.facts, first, size)
            columns[OPENING.name] = _column(done.openings[first:stop])
            columns[TOOLS.name] = columns[LABELS.name] = _texts_column(done.own_texts, first, size)
            columns["file"] = pa.repeat(place.file, size)
            columns["row_index"] = _numbers(place.first_row + first, size)
            columns[INPUT_ROW.name] = _numbers(self.input_rows + first, size)
            columns[DIMENSIONS.name] = _dimensions(done.dimensions, first, size)
            columns = {name: repeat_values(one, own) for name, one in columns.items()}
            columns |= further.columns(columns, slice(first, stop), own)
            columns["row_id"] = _numbers(self.rows + int(ends[first] - times[first]), int(own.sum()))
            columns[SAMPLE.name] = _sample_numbers(own)
            yield pa.record_batch([columns[n] for n in self._schema.names], self._schema)

    def _at_once(self, done: PreparedPrompts) -> int:
        # Fewer rows if texts are long, since each row repeats its text
        longest = max((len(text) for text in (*done.params, *done.own_texts.texts)), default=0)
        most = min(MOST_ROWS, max(BATCH_ROWS, _TEXT_BYTES // max(1, longest)))
        return max(1, most // self._attempts)

    def _count(self, done: PreparedPrompts, times: Int64s) -> None:
        self.rows += int(times.sum())
        self.input_rows += len(times)
        self.most_samples = max(self.most_samples, int(times.max(initial=1)))
        whose, more = done.further.rows, done.further.counts
        self.total_tokens += int((done.counts * times).sum())
        self.total_tokens += int(more.sum()) - int(done.counts[whose].sum())
        self.known_rows += int(times[done.counts > 0].sum()) if done.reused else 0
        self.error_rows += int(times[[*done.errors]].sum()) if done.errors else 0
        self.unread.join(done.unread)

    def _note_params(self, params: Sequence[SamplingParams]) -> None:
        self.has_vectors |= any(p.pooling is not None for p in params)
        asked = [p.logprobs for p in params if p.logprobs is not None]
        if asked:
            self.logprobs = max(*asked, self.logprobs or 0)
        self.prompt_logprobs |= any(p.prompt_logprobs is not None for p in params)

    def write_separately(self, folder: Path, rows: PreparedRows) -> None:
        """Write prepared rows that are not part of the input to index parts in another folder.

        They are the content-free prompt of a classification.

        Raises StorageError.
        """
        parts = PartWriter(folder, self._schema, self._ops)
        even = EvenBatches(parts, self._schema)
        for batch in self._batches(RowPlace("", 0), rows, np.ones(len(rows), np.int64)):
            even.append(batch)
        even.commit()

    def end_part(self) -> None:
        """End the current index part. Later rows go to a new part. Raises StorageError."""
        self._even.commit()

    def take_snapshot(self) -> RowsSoFar:
        """End the current index part, and return the index of all rows so far. Raises StorageError."""
        parts = tuple(self._even.commit())
        return RowsSoFar(parts, self.rows, self.error_rows, self.logprobs, TokenStore(self._tokens.written()))

    def all_rows(self) -> RowsSoFar:
        """Return the index of all rows. Call it after `commit`."""
        tokens = TokenStore(self._layout.tokens)
        return RowsSoFar(tuple(self._parts.parts), self.rows, self.error_rows, self.logprobs, tokens)

    def commit(self) -> None:
        """Write all rows and tokens of the index to disk. Raises StorageError."""
        self._even.commit()
        self._tokens.commit()

    @property
    def parts(self) -> Sequence[Any]:
        """Return the paths of the finished index parts, including reused ones."""
        return self._parts.parts

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.__exit__()
        self._tokens.__exit__(None)


class _Further(NamedTuple):
    prompts: FurtherPrompts
    starts: Int64s

    @classmethod
    def of(cls, prompts: FurtherPrompts, tokens: TokenWriter) -> _Further:
        counts = prompts.counts.astype(np.int64)
        return cls(
            prompts, (tokens.append(prompts.tokens) if len(prompts) else 0) + np.cumsum(counts) - counts
        )

    def columns(self, columns: Mapping[str, pa.Array], rows: slice, times: Int64s) -> dict[str, pa.Array]:
        # These columns differ between the prompts of a row: offset, number of tokens and work key
        first, end = np.searchsorted(self.prompts.rows, [rows.start, rows.stop]).tolist()
        if first == end:
            return {}
        whose, begins = self.prompts.rows[first:end] - rows.start, np.cumsum(times) - times
        # Its number among the prompts of its row
        own = np.arange(end - first) - np.searchsorted(whose, whose)
        places = begins[whose] + own + 1
        keys = np.frombuffer(self.prompts.keys, f"V{KEY_BYTES}")[first:end]
        values = {
            "token_offset": pa.array(self.starts[first:end]),
            "token_count": pa.array(self.prompts.counts[first:end]),
            "key": pa.Array.from_buffers(
                pa.binary(KEY_BYTES), end - first, [None, pa.py_buffer(keys.tobytes())]
            ),
        }
        marks = np.zeros(int(times.sum()), np.bool_)
        marks[places] = True
        return {
            name: pc.replace_with_mask(columns[name], pa.array(marks), one) for name, one in values.items()
        }


def _dimensions(asked: NDArray[np.int32] | None, first: int, size: int) -> pa.Array:
    if asked is None:
        return pa.nulls(size, DIMENSIONS.type)
    own = asked[first : first + size]
    return _column(own, _valid(own > 0))


def _work_columns(
    done: PreparedPrompts, params: Sequence[SamplingParams], starts: Int64s, rows: slice, longest: int
) -> dict[str, pa.Array]:
    counts, most = done.counts[rows], done.max_tokens[rows]
    dead = counts == 0  # a row without tokens is an error row
    valid = _valid(~dead)
    placed = _valid(np.zeros(len(counts), np.bool_)) if done.reused else valid
    numbers = _column(done.params_of[rows], valid)
    keys = pa.py_buffer(done.keys[KEY_BYTES * rows.start : KEY_BYTES * rows.stop])
    return {
        "token_offset": _column(starts[rows], placed),
        "token_count": _column(counts, valid),
        "expected_tokens": _column(np.minimum(most, longest - counts), valid),
        "key": pa.Array.from_buffers(pa.binary(KEY_BYTES), len(counts), [valid, keys]),
        "params": pa.array(done.params, pa.string()).take(numbers),
        "greedy": pa.array([one.greedy for one in params], pa.bool_()).take(numbers),
    }


def _row_ranges(ends: Int64s, at_once: int) -> Iterator[tuple[int, int]]:
    first = 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, done + at_once, side="right")))
        yield first, stop
        first = stop


def _sample_numbers(times: Int64s) -> pa.Array:
    firsts = np.repeat(np.cumsum(times) - times, times)
    return _column((np.arange(len(firsts)) - firsts).astype(np.int32))


def _valid(marks: NDArray[np.bool_]) -> pa.Buffer | None:
    return None if marks.all() else pa.py_buffer(np.packbits(marks, bitorder="little"))


def _texts_column(own: OwnTexts, first: int, size: int) -> pa.Array:
    if not own.texts:
        return pa.nulls(size, TOOLS.type)
    numbers = own.of[first : first + size]
    return pa.array(own.texts, TOOLS.type).take(pa.array(numbers - 1, mask=numbers == 0))


def _rung_columns(done: PreparedPrompts, rows: slice, longest: int) -> dict[str, pa.Array]:
    columns = {}
    for attempt, rung in enumerate(done.rungs, 2):
        none = rung.params_of[rows] < 0
        valid = pa.py_buffer(np.packbits(~none, bitorder="little"))
        keys = pa.py_buffer(rung.keys[KEY_BYTES * rows.start : KEY_BYTES * rows.stop])
        most = np.minimum(rung.max_tokens[rows], longest - done.counts[rows])
        key, params, expected = attempt_columns(attempt)
        columns[key] = pa.Array.from_buffers(pa.binary(KEY_BYTES), len(none), [valid, keys])
        numbers = _column(np.maximum(rung.params_of[rows], 0), valid)
        columns[params] = pa.array(done.params, pa.string()).take(numbers)
        columns[expected] = _column(most, valid)
    return columns


def _fact_columns(facts: RowFacts, first: int, size: int) -> dict[str, pa.Array]:
    columns = {"custom_id": facts.ids.slice(first, size)}
    if facts.endpoints is not None:
        columns["endpoint"] = facts.endpoints.slice(first, size)
    return columns


def _error_columns(errors: dict[int, RowError], first: int, size: int) -> dict[str, pa.Array]:
    here = [at for at in range(first, first + size) if at in errors] if errors else []

    def column(name: str, kind: pa.DataType) -> pa.Array:
        if not here:
            return pa.nulls(size, kind)
        return pa.array([getattr(errors.get(at), name, None) for at in range(first, first + size)], kind)

    return {
        "error_code": column("code", pa.string()),
        "error_class": column("error_class", pa.string()),
        "error_message": column("message", pa.string()),
        "retryable": column("retryable", pa.bool_()),
    }


def _column(values: NDArray[Any], valid: pa.Buffer | None = None) -> pa.Array:
    # `pa.array` would check for pandas on each call, which takes longer than everything else here
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(np.ascontiguousarray(values))])


def _numbers(first: int, count: int) -> pa.Array:
    return _column(np.arange(first, first + count))
