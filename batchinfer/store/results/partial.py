"""Partial results: the finished rows of a job that is still running, or was stopped.

Needs no lock and changes nothing. What a running job adds meanwhile is not seen; when it publishes and
purges its index in the middle of a read, that is a loud error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from batchinfer.filesystem.duck import Watched
from batchinfer.filesystem.durable import Digest, FileOps
from batchinfer.store.answers.completion_store import read_records, write_table
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import Index
from batchinfer.store.outputs.content_free import calibrated_scoring
from batchinfer.store.results.index_rows import IndexView
from batchinfer.store.results.join import completion_of, joined
from batchinfer.store.results.result_rows import result_rows, result_schema

PARTIAL = "partial.json"  # next to an index: the model and the store that its partial results are made of


def partial_reader(
    index: IndexView,
    completions: Path,
    detokenizer: Detokenizer,
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> pa.RecordBatchReader:
    """The rows that are finished (error rows of the input included), in input order, in the result's schema.

    A stream that DuckDB can query: `duckdb.from_arrow(reader)`. `completions` is the store's folder, `spill` a folder
    for sorting outside of the state folder; `watched`: see `duck.connection`. Raises StorageError, OutOfMemory,
    InputCorrupt.
    """
    records, _ = read_records(completions, digests=True) if completions.is_dir() else ({}, ())

    def batches() -> Iterator[pa.RecordBatch]:
        join = joined(
            index.index_parts,
            sorted(records),
            spill / "join",
            attempts=index.attempts,
            memory_limit=memory_limit,
            threads=threads,
            watched=watched,
        )
        with result_rows(index, join, detokenizer, spill, [(0, join.counts.rows)], partial=True) as rows:
            for table in rows.tables(0):
                yield from table.to_batches()

    return pa.RecordBatchReader.from_batches(result_schema(index), batches())


def with_known_prior(index: Index, completions: Path, spill: Path, watched: Watched = nullcontext) -> Index:
    """Return an index whose labels are calibrated, where the job asks for it; `spill` and `watched`: see `joined`.
    Raises BatchInferError as long as the prompt without content has no answer, and StorageError."""
    if not index.content_free_parts or index.scoring is None:
        return index
    records = read_records(completions)[0] if completions.is_dir() else {}
    found = completion_of(index.content_free_parts, sorted(records), spill / "join", watched)
    return replace(index, scoring=calibrated_scoring(index.scoring, found and found[:2]))


def write_partial(reader: pa.RecordBatchReader, path: Path, ops: FileOps | None = None) -> Digest:
    """Write a stream of finished rows to one Parquet file, durably. Raises StorageError."""
    return write_table(path, reader, ops or FileOps())
