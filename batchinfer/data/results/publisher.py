"""Publishing: the whole result staged aside, then put in place by one rename.

Readers see the older result, the new one, or a loud error: every file name carries the generation, so that
no name means two things. The generation is derived from the contents, so equal rows give equal names and
bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.core.errors import BatchInferError, OutputConflict
from batchinfer.data.columns.logprob_column import Detokenizer
from batchinfer.data.outputs.kind import OutputKind
from batchinfer.data.outputs.registry import KINDS
from batchinfer.data.results.manifest import (
    MANIFEST_NAME,
    Manifest,
    Older,
    PublishSpec,
    ResultFile,
    check_destination,
    file_name,
    generation_of,
)
from batchinfer.data.results.published import intact
from batchinfer.data.results.result_rows import BATCH_ROWS, IndexView, result_schema, result_tables
from batchinfer.data.storage.durable import DurableFile, ExchangeUnsupported, FileOps, storage, write_json
from batchinfer.data.storage.state import StateFolder

# Of one row group, unless a single row has more: 20 MB in memory
GROUP_ENTRIES = 1 << 20


def publish(
    index: IndexView,
    completion_parts: Sequence[Path],
    spec: PublishSpec,
    detokenizer: Detokenizer,
    state: StateFolder,
    *,
    replace: bool = False,
    memory_limit: str | None = None,
    threads: int = 2,
    on_rows: Callable[[int], None] | None = None,
) -> Manifest:
    """Publish the result of a job to `state.results`; the caller holds the state's lock.

    Every key of the index must have a completion. `replace` allows taking the place of another job's result. `on_rows`
    hears how many rows were staged. Raises OutputConflict (73), StorageError (74), BatchInferError when rows are
    missing.
    """
    older = check_destination(state.results, spec.job, replace, ours=state.has_published)
    stage = _fresh(state)
    tables = result_tables(
        index,
        completion_parts,
        detokenizer,
        state.staging / "spill",
        memory_limit=memory_limit,
        threads=threads,
    )
    tally = _Tally(on_rows or (lambda rows: None))
    schema, kind = result_schema(index), KINDS[index.output]
    groups = _row_groups(tally.counting(tables), spec.rows_per_file, kind)
    staged = _write_files(stage, schema, groups, spec.rows_per_file, state.ops)
    if tally.rows != index.rows:
        raise BatchInferError(
            f"the join gave {tally.rows} rows for an input of {index.rows}: nothing published"
        )
    manifest = _finish(stage, staged, spec, tally, _endpoints(index), state.ops)
    if older and older.generation == manifest.generation and intact(state.results):
        _remove(stage, state.ops)
    else:
        _put_in_place(stage, older, state)
    return manifest


@dataclass(slots=True)
class _Tally:
    """Counts rows as they pass."""

    on_rows: Callable[[int], None]
    rows: int = field(default=0)
    errors: int = field(default=0)
    retryable: int = field(default=0)

    def counting(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            self.rows += table.num_rows
            self.errors += pc.sum(pc.equal(table.column("status"), "error")).as_py() or 0
            self.retryable += pc.sum(table.column("retryable")).as_py() or 0
            self.on_rows(table.num_rows)
            yield table


def _fresh(state: StateFolder) -> Path:
    """An empty staging folder; what an interrupted run left in it was never seen by anyone."""
    if state.staging.exists():
        _remove(state.staging, state.ops)
    stage = state.staging / "next"
    with storage(stage, "create"):
        state.ops.mkdir(state.staging, 0o700)
        state.ops.mkdir(stage)
    return stage


def _write_files(
    stage: Path, schema: pa.Schema, groups: Iterator[pa.Table], rows_per_file: int, ops: FileOps
) -> list[ResultFile]:
    """Files of exactly `rows_per_file` rows, but for the last; at least one, so that the schema is always
    there.
    """
    done: list[ResultFile] = []
    writer = _ResultWriter(stage / _number(0), schema, ops)
    try:
        for group in groups:
            if writer.rows == rows_per_file:
                done.append(writer.finish())
                writer = _ResultWriter(stage / _number(len(done)), schema, ops)
            writer.write(group)
        done.append(writer.finish())
    except BaseException:
        writer.abandon()
        raise
    return done


def _number(count: int) -> str:
    return f"{count:05d}.parquet"


def _row_groups(tables: Iterator[pa.Table], rows_per_file: int, kind: OutputKind) -> Iterator[pa.Table]:
    """Row groups cut by the rows alone, so that equal rows give equal bytes however they arrive: BATCH_ROWS each, or
    fewer where they have GROUP_ENTRIES values besides."""
    held: list[pa.Table] = []
    rows = entries = in_file = 0
    for table in tables:
        each, start = kind.entries(table), 0
        while start < table.num_rows:
            ends = entries + np.cumsum(each[start : start + min(BATCH_ROWS - rows, rows_per_file - in_file)])
            taken = max(int(np.searchsorted(ends, GROUP_ENTRIES, side="right")), int(rows == 0))
            held += [table.slice(start, taken)] if taken else []
            start, rows, in_file = start + taken, rows + taken, in_file + taken
            entries = int(ends[taken - 1]) if taken else entries
            if start < table.num_rows or rows == BATCH_ROWS or in_file == rows_per_file:
                yield pa.concat_tables(held).combine_chunks()
                held, rows, entries, in_file = [], 0, 0, in_file % rows_per_file
    if held:
        yield pa.concat_tables(held).combine_chunks()


class _ResultWriter:
    """One staged Parquet file; the footer is written only by `finish`, the file given up by any exception."""

    def __init__(self, path: Path, schema: pa.Schema, ops: FileOps) -> None:
        self.rows = 0
        self._file = DurableFile(path, ops)
        self._writer = pq.ParquetWriter(
            self._file, schema, compression="zstd", write_page_checksum=True, write_statistics=True
        )

    def write(self, group: pa.Table) -> None:
        self._writer.write_table(_with_own_dictionaries(group), row_group_size=group.num_rows)
        self.rows += group.num_rows

    def finish(self) -> ResultFile:
        self._writer.close()
        digest = self._file.commit()
        return ResultFile(self._file.path.name, self.rows, digest.bytes, digest.sha256)

    def abandon(self) -> None:
        self._file.abandon()


def _with_own_dictionaries(group: pa.Table) -> pa.Table:
    """Dictionaries of just the values in these rows, in the order of their first: equal rows give equal bytes."""
    for place, column in enumerate(group.schema):
        if pa.types.is_dictionary(column.type):
            group = group.set_column(place, column, _with_own_dictionary(group.column(place)))
    return group


def _with_own_dictionary(column: pa.ChunkedArray) -> pa.DictionaryArray:
    shared = pa.concat_arrays(column.chunks) if column.num_chunks != 1 else column.chunk(0)
    used = shared.indices.unique().drop_null()
    return pa.DictionaryArray.from_arrays(pc.index_in(shared.indices, used), shared.dictionary.take(used))


def _finish(
    stage: Path,
    staged: Sequence[ResultFile],
    spec: PublishSpec,
    tally: _Tally,
    endpoints: tuple[str, ...],
    ops: FileOps,
) -> Manifest:
    """Give the files their generation's names and write the manifest."""
    generation = generation_of(spec, staged)
    files = tuple(
        _renamed(stage, file, file_name(generation, number), ops) for number, file in enumerate(staged)
    )
    manifest = Manifest(
        job=spec.job,
        identity=spec.identity,
        inputs=spec.inputs,
        numerics=spec.numerics,
        generation=generation,
        rows=tally.rows,
        ok=tally.rows - tally.errors,
        errors=tally.errors,
        retryable=tally.retryable,
        endpoints=endpoints,
        files=files,
    )
    write_json(stage / MANIFEST_NAME, manifest.to_json(), ops)
    return manifest


def _renamed(stage: Path, file: ResultFile, name: str, ops: FileOps) -> ResultFile:
    with storage(stage / name, "rename to"):
        ops.rename(stage / file.name, stage / name)
    return replace_fields(file, name=name)


def _put_in_place(stage: Path, older: Older | None, state: StateFolder) -> None:
    with storage(state.results.parent, "create"):
        state.ops.mkdir(state.results.parent)
    if older is None:
        _put_if_absent(stage, state)
    else:
        _replace(stage, older, state)
    for folder in (state.results.parent, state.staging):
        with storage(folder, "fsync"):
            state.ops.fsync_folder(folder)


def _put_if_absent(stage: Path, state: StateFolder) -> None:
    with storage(state.results, "publish to"):
        try:
            state.ops.rename(stage, state.results)  # fails on a folder that is not empty
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise OutputConflict(f"{state.results}: something was put there while this job ran") from error


def _replace(stage: Path, older: Older, state: StateFolder) -> None:
    """Swap with the older result and keep that one for an hour, which starts now.

    Where folders cannot be swapped (not on Linux, or a file system without it) the older one is moved away
    first: for a moment there is no result, which a reader sees as a missing folder.
    """
    ops, kept = state.ops, state.generations / older.generation
    with storage(kept, "make room for"):
        ops.mkdir(state.generations, 0o700)
        if kept.exists():
            ops.remove_tree(kept)
    with storage(state.results, "replace"):
        ops.touch(state.results)
        try:
            ops.exchange(stage, state.results)
        except ExchangeUnsupported:
            ops.rename(state.results, kept)
            ops.rename(stage, state.results)
        else:
            ops.rename(stage, kept)


def _remove(folder: Path, ops: FileOps) -> None:
    with storage(folder, "remove"):
        ops.remove_tree(folder)


def _endpoints(index: IndexView) -> tuple[str, ...]:
    """The endpoints that an OpenAI batch input names; none for other inputs."""
    found: set[str] = set()
    for path in index.index_parts:
        with pq.ParquetFile(path) as file:
            if "endpoint" not in file.schema_arrow.names:
                return ()
            for batch in file.iter_batches(columns=["endpoint"]):
                found.update(value for value in pc.unique(batch.column(0)).to_pylist() if value is not None)
    return tuple(sorted(found))
