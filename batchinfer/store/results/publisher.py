"""Publishes a result: all files are staged first, then put in place by one rename.

Readers see the older result, the new one, or an error. Every file name has the generation, so a name never refers to
two contents. The generation is derived from the contents, so equal rows give equal names and bytes.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.core.errors import BatchInferError, OutputConflict
from batchinfer.filesystem.durable import ExchangeUnsupported, FileOps, storage, write_json
from batchinfer.filesystem.state import StateFolder
from batchinfer.machine.cpus import usable_cpus
from batchinfer.store.columns.logprob_column import Detokenizer
from batchinfer.store.index.index import Index
from batchinfer.store.outputs.best_samples import indexed_rows, published_rows
from batchinfer.store.outputs.registry import KINDS
from batchinfer.store.results.join import Join
from batchinfer.store.results.manifest import (
    MANIFEST_NAME,
    Manifest,
    OlderResult,
    PublishSpec,
    ResultFile,
    check_destination,
    file_name,
    generation_of,
)
from batchinfer.store.results.published import open_if_intact
from batchinfer.store.results.result_files import ResultFiles, StagedFile, spans_of
from batchinfer.store.results.result_rows import result_rows, result_schema
from batchinfer.store.results.reuse.earlier_files import EarlierFiles, remember_files
from batchinfer.store.results.reuse.fingerprints import compute_fingerprints

MOST_THREADS = 4  # each thread holds batches of rows in memory


def publish(
    index: Index,
    join: Join,
    spec: PublishSpec,
    detokenizer: Detokenizer,
    state: StateFolder,
    *,
    replace: bool = False,
    threads: int | None = None,
    remember: bool = True,
    on_rows: Callable[[int], None] | None = None,
) -> Manifest:
    """Publish the result of a job to `state.destination`, and return its manifest.

    The caller must hold the lock of the result.

    Args:
        index: The index.
        join: The positions of the answers. Every work key of the index must have one.
        spec: The identity of the result.
        detokenizer: Converts tokens to text.
        state: The state folder of the result.
        replace: True if the result of another job may be replaced.
        threads: Threads that write files. None: one per core, at most MOST_THREADS.
        remember: True to record the files, so that the next result can reuse them.
        on_rows: Called with the number of rows that were written since the last call.

    Raises:
        OutputConflict: The folder must not be replaced. Exit code 73.
        StorageError: A file cannot be read or written. Exit code 74.
        BatchInferError: Requests have no completion.
    """
    older = check_destination(state.destination, spec.job, replace, ours=state.has_published)
    join.refuse_missing()
    stage = _fresh(state)
    threads = threads or min(usable_cpus(), MOST_THREADS)
    earlier = EarlierFiles(state)
    prints = compute_fingerprints(index, join, spec, threads, earlier.fingerprints)
    staging = _Staging(index, join, spec, stage, threads, on_rows or (lambda rows: None))
    files = staging.copy_unchanged(prints.files, earlier)
    files += staging.write_missing(detokenizer, {file.number for file in files}, state)
    files.sort(key=lambda file: file.number)
    written = sum(file.rows for file in files)
    wanted = published_rows(index.best, index.rows)
    if written != wanted:
        raise BatchInferError(f"the join gave {written} rows for an input of {wanted}: nothing published")
    manifest = _finish(stage, files, spec, _endpoints(index), state.ops)
    if older and older.generation == manifest.generation and open_if_intact(state.destination):
        _remove(stage, state.ops)
    else:
        _put_in_place(stage, older, state)
    if remember:
        remember_files(state, prints, files)
    return manifest


@dataclass(frozen=True, slots=True)
class _Staging:
    index: Index
    join: Join
    spec: PublishSpec
    stage: Path
    threads: int
    on_rows: Callable[[int], None]

    def copy_unchanged(self, fingerprints: Sequence[str], earlier: EarlierFiles) -> list[StagedFile]:
        found = []
        for number, fingerprint in enumerate(fingerprints):
            left = published_rows(self.index.best, self.index.rows) - number * self.spec.rows_per_file
            file = earlier.copy(number, fingerprint, min(left, self.spec.rows_per_file), self.stage)
            if file is not None:
                found.append(file)
                self.on_rows(file.rows)
        return found

    def write_missing(
        self, detokenizer: Detokenizer, there: Collection[int], state: StateFolder
    ) -> list[StagedFile]:
        index, per_file = self.index, self.spec.rows_per_file
        indexed = indexed_rows(index.best, per_file)
        spans = spans_of(index.rows, indexed, self.threads, there)
        if not spans:
            return []
        files = ResultFiles(
            self.stage, result_schema(index), KINDS[index.output], per_file, state.ops, indexed
        )
        with result_rows(index, self.join, detokenizer, state.staging / "spill", spans) as rows:
            return files.write(spans, rows.tables, self.threads, self.on_rows)


def _fresh(state: StateFolder) -> Path:
    # Removes the files of an interrupted run
    if state.staging.exists():
        _remove(state.staging, state.ops)
    stage = state.staging / "next"
    with storage(stage, "create"):
        state.ops.mkdir(state.staging, 0o700)
        state.ops.mkdir(stage)
    return stage


def _finish(
    stage: Path, staged: Sequence[StagedFile], spec: PublishSpec, endpoints: tuple[str, ...], ops: FileOps
) -> Manifest:
    written = [file.published for file in staged]
    generation = generation_of(spec, written)
    files = tuple(
        _renamed(stage, file, file_name(generation, number), ops) for number, file in enumerate(written)
    )
    rows, errors = sum(file.rows for file in staged), sum(file.errors for file in staged)
    manifest = Manifest(
        job=spec.job,
        identity=spec.identity,
        inputs=spec.inputs,
        numerics=spec.numerics,
        generation=generation,
        rows=rows,
        ok=rows - errors,
        errors=errors,
        retryable=sum(file.retryable for file in staged),
        endpoints=endpoints,
        files=files,
    )
    write_json(stage / MANIFEST_NAME, manifest.to_json(), ops)
    return manifest


def _renamed(stage: Path, file: ResultFile, name: str, ops: FileOps) -> ResultFile:
    with storage(stage / name, "rename to"):
        ops.rename(stage / file.name, stage / name)
    return replace_fields(file, name=name)


def _put_in_place(stage: Path, older: OlderResult | None, state: StateFolder) -> None:
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


def _replace(stage: Path, older: OlderResult, state: StateFolder) -> None:
    # Swaps the staged result with the older one, which is kept for an hour. If the system cannot swap folders
    # (macOS, some file systems), the older one is moved away first. For a moment there is no result, and
    # readers see a missing folder
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


def _endpoints(index: Index) -> tuple[str, ...]:
    found: set[str] = set()
    for path in index.index_parts:
        with pq.ParquetFile(path) as file:
            if "endpoint" not in file.schema_arrow.names:
                return ()
            for batch in file.iter_batches(columns=["endpoint"]):
                found.update(value for value in pc.unique(batch.column(0)).to_pylist() if value is not None)
    return tuple(sorted(found))
