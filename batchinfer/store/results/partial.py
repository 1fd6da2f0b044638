"""Partial results: the finished rows of a job that is running or was stopped.

Reading them needs no lock and changes nothing. Rows that a running job adds later are not seen. If it publishes and
removes its index during a read, the read fails with an error.
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
from batchinfer.store.results.join import find_completion, join_answers
from batchinfer.store.results.result_rows import result_rows, result_schema

PARTIAL = "partial.json"  # in the folder of an index: the model and the store of its partial results


def partial_reader(
    index: Index,
    completions: Path,
    detokenizer: Detokenizer,
    spill: Path,
    *,
    memory_limit: str | None = None,
    threads: int = 2,
    watched: Watched = nullcontext,
) -> pa.RecordBatchReader:
    """Return the finished rows of a job, which may still run, in input order, with the columns of its result.

    Error rows are included. DuckDB can query the reader: `duckdb.from_arrow(reader)`.

    Args:
        index: The index of the job.
        completions: The folder of the store.
        detokenizer: Converts tokens to text.
        spill: Folder for temporary files, outside of the state folder.
        memory_limit: Memory of DuckDB. None: `working_memory`.
        threads: Threads of DuckDB.
        watched: Makes queries interruptible, see `duck.connection`.

    Raises:
        StorageError: A file cannot be read.
        OutOfMemory: DuckDB exceeded its memory limit.
        InputCorrupt: The index is damaged.
    """
    records, _ = read_records(completions, digests=True) if completions.is_dir() else ({}, ())

    def batches() -> Iterator[pa.RecordBatch]:
        join = join_answers(
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
    """Return the index of a job with the prior of its labels added, if the job calibrates labels.

    The prior is read from the stored answer to the content-free prompt. Other indexes are returned unchanged.

    Args:
        index: The index.
        completions: The folder of the store.
        spill: Folder for temporary files.
        watched: Makes queries interruptible, see `duck.connection`.

    Raises:
        BatchInferError: The content-free prompt has no answer yet.
        StorageError: A file cannot be read.
    """
    if not index.content_free_parts or index.scoring is None:
        return index
    records = read_records(completions)[0] if completions.is_dir() else {}
    found = find_completion(index.content_free_parts, sorted(records), spill / "join", watched)
    return replace(index, scoring=calibrated_scoring(index.scoring, found and found[:2]))


def write_partial(reader: pa.RecordBatchReader, path: Path, ops: FileOps | None = None) -> Digest:
    """Write rows of a result to a single Parquet file, sync it to disk, and return its size and digest.

    Raises StorageError.
    """
    return write_table(path, reader, ops or FileOps())
