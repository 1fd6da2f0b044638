"""Ingest: reads the input files and writes a complete index, in bounded memory.

    reader ─▶ chunks ─▶ render workers (rows, templates, tokenizer) ─▶ token store, index ─▶ marker

This process splits files into chunks and writes the prepared rows. The work per row is done in the workers.

A complete index with the same identity is reused. An incomplete one is removed and rebuilt.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.filesystem.durable import FileOps, sha256_of, storage
from batchinfer.input.chunk import InputChunk
from batchinfer.input.input_file import InputFile
from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.prompts.columns import Columns, choose_prompts
from batchinfer.input.prompts.keys import CONSTRAINT_RULES
from batchinfer.input.prompts.render_pool import ActivityCallback, RenderPool
from batchinfer.input.prompts.render_worker import RenderSpec
from batchinfer.input.reader import Reader
from batchinfer.input.sql import materialise
from batchinfer.input.tokenizer.tokenizer import Tokenizer
from batchinfer.machine.cpus import usable_cpus
from batchinfer.store.index.content_free_row import check_rendered, content_free_row
from batchinfer.store.index.duplicates import EqualRows
from batchinfer.store.index.index import BestOf, Index, Layout, PendingSegments, index_schema
from batchinfer.store.index.ingest_options import IngestOptions
from batchinfer.store.index.keeping import KeptIndex, KeptIndexReuse, RowsToKeep, kept_index
from batchinfer.store.index.passthrough import JsonSpool, TypedColumns
from batchinfer.store.index.render_spec import render_spec
from batchinfer.store.index.requested import PARTS, AnswerSchema
from batchinfer.store.index.reused_rows import NO_REUSED_ROWS, ReusedRows
from batchinfer.store.index.writer import IndexWriter, RowPlace, RowsSoFar

if TYPE_CHECKING:
    from batchinfer.job import Job

INGEST_FORMAT = 9  # increase it when the same input gives a different index


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """The progress of reading a job's input.

    Attributes:
        rows: Number of rows of the index so far.
        bytes_read: Bytes of the input files that were read, compressed if the files are.
        bytes_total: Bytes of all input files.
        keys: The concatenated work keys, 32 bytes each, of the rows in the last chunk that need an answer.
            Rows with a stored answer and error rows are left out.
    """

    rows: int
    bytes_read: int
    bytes_total: int
    keys: bytes = b""


def ingest(
    job: Job,
    tokenizer: Tokenizer,
    options: IngestOptions,
    scratch: Path,
    progress: Callable[[IngestProgress], None] | None = None,
    ops: FileOps | None = None,
    on_activity: ActivityCallback | None = None,
    keeping: KeptIndexReuse | None = None,
) -> Index:
    """Read the job's input into an index, and return it. A complete index from an earlier run is reused.

    A row that cannot be prepared raises nothing: it is an error row of the index.

    Args:
        job: The job.
        tokenizer: The tokenizer of the model.
        options: Options that are not in the job file.
        scratch: The folder of indexes. Each index has a subfolder named after its identity.
        progress: Called after each chunk of the input.
        ops: File operations, replaced in tests.
        on_activity: Receives the activities of the render workers, timed with `time.perf_counter`.
        keeping: The kept index of the job, which is reused and then replaced. None: nothing is kept.

    Raises:
        InputMissing: No file matches. Exit code 66.
        InputCorrupt: A file is damaged. Exit code 65.
        JobFileError: No row has a column that the job uses, or a query failed. Exit code 78.
        StorageError: A file cannot be read or written. Exit code 74.
    """
    found = index_or_ingestion(job, tokenizer, options, scratch, ops, on_activity, keeping)
    if isinstance(found, Index):
        return found
    with closing(found.steps()) as steps:
        for at in steps:
            if progress is not None:
                progress(at)
    return found.finish()


def index_or_ingestion(
    job: Job,
    tokenizer: Tokenizer,
    options: IngestOptions,
    scratch: Path,
    ops: FileOps | None = None,
    on_activity: ActivityCallback | None = None,
    keeping: KeptIndexReuse | None = None,
) -> Index | Ingestion:
    """Return the complete index of the job's input, or an Ingestion that builds it in steps.

    `ingest` documents the arguments.
    """
    files = job_files(job, scratch)
    identity = _identity(job, options, tokenizer, files)
    folder = scratch / identity[:16]
    found = Index.find(folder, identity)
    # The answers of known rows, which have no tokens, may have been removed since
    if found is not None and not found.known_rows:
        return found
    return Ingestion(job, options, tokenizer, files, identity, folder, ops or FileOps(), on_activity, keeping)


def job_files(job: Job, scratch: Path) -> list[InputFile]:
    """Return the job's input files. If the input is a SQL query, run it and return the file with its result.

    The query also runs when an interrupted job is resumed.

    Args:
        job: The job.
        scratch: The folder for the result of the query.
    """
    if job.input.sql is None:
        return input_files(job)
    memory = None if job.input.sql_memory == "auto" else job.input.sql_memory
    queried = materialise(job.input.sql, job.source, scratch / "query" / "rows.parquet", memory)
    # When the query ran says nothing about its rows
    return [replace(queried, mtime_ns=0, ctime_ns=0, inode=0)]


def with_files(job: Job, files: Sequence[InputFile]) -> Job:
    """Return the job with the files of `job_files` as its input, so that a query does not run again."""
    if job.input.sql is None:
        return job
    source = job.input.model_copy(update={"sql": None, "path": files[0].path, "format": "parquet"})
    return job.model_copy(update={"input": source})


def _identity(job: Job, options: IngestOptions, tokenizer: Tokenizer, files: Sequence[InputFile]) -> str:
    # The result of a query counts by its content
    inputs = [f.to_json() | ({"sha256": sha256_of(Path(f.path))} if job.input.sql else {}) for f in files]
    value = _settings(job, options, tokenizer) | {"inputs": inputs}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _settings(job: Job, options: IngestOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    # Everything except the input
    value: dict[str, Any] = {
        "format": [INGEST_FORMAT, CONSTRAINT_RULES],
        "job": json.loads(job.identity_json()),
        "context": options.context.hex(),
        "limits": [options.max_model_len, options.vocab_size],
        "tokenizer": tokenizer.fingerprint,
        "now": options.now.date().isoformat() if tokenizer.may_write_date else None,
    }
    parts = {name: getattr(options.asked, name) for name in PARTS}
    value |= {name: part.to_json() for name, part in parts.items() if part is not None}
    if options.adapters:
        value["adapters"] = dict(options.adapters)
    return value


class Ingestion:
    """Builds the index of a job: `steps` reads the input, then `finish` completes the index.

    Between two steps, `take_snapshot` returns the index of the rows so far, which can be planned while the rest is
    read. These three methods may run in any thread, but only one at a time.
    """

    def __init__(
        self,
        job: Job,
        options: IngestOptions,
        tokenizer: Tokenizer,
        files: Sequence[InputFile],
        identity: str,
        folder: Path,
        ops: FileOps,
        on_activity: ActivityCallback | None,
        keeping: KeptIndexReuse | None,
    ) -> None:
        self.job, self._on_activity = job, on_activity
        self._keeping = keeping
        self._options = options
        self._tokenizer = tokenizer
        self._files = files
        self._identity = identity
        self._layout = Layout(folder)
        self._ops = ops
        self._reader: Reader | None = None
        self._writer: IndexWriter | None = None  # once there is a row
        self._kept: KeptIndex | None = None  # once rows are read
        self.reused: ReusedRows = NO_REUSED_ROWS  # the first rows, reused whole from the last run
        self._refused = 0  # rows that became error rows because an earlier row has the same custom_id
        self._equal = EqualRows(
            self._layout.spill,
            options.context,
            ops,
            unique_ids=job.input.unique_ids,
            attempts=job.attempts,
            samples=job.has_samples,
            threads=max(2, usable_cpus()),
        )

    @property
    def folder(self) -> Path:
        """Return the folder of the index that is built."""
        return self._layout.folder

    @property
    def is_final(self) -> bool:
        """Return True if later input cannot change the index rows so far. `take_snapshot` requires this."""
        # The prompt without content is read last, and its answer calibrates all labels
        whole = self.job.classify.content_free is None
        # Types inferred from all rows may differ from the types of reused rows, which are then read again
        typed = self._reader is not None and self._reader.schema() is not None
        return whole and (typed or not self.reused.carried)

    def steps(self) -> Generator[IngestProgress, None, None]:
        """Read the input, one chunk per step, and yield the progress. Raises the same errors as `ingest`.

        Close the generator to abort.
        """
        self._start_over()
        files = self._inputs()
        if not (yield from self._read(files, take=self._may_take)):
            yield from self._read(files, take=False)

    def _read(self, files: Sequence[InputFile], *, take: bool) -> Generator[IngestProgress, None, bool]:
        # Returns False if the passthrough columns of reused rows have other types now. The input must then be
        # read without reuse
        self._make_folders()
        reader = self._reader = self._opened(files)
        schema = reader.schema()
        mode, columns = choose_prompts(self.job, self._tokenizer, schema, reader.shape)
        spec = render_spec(
            self.job, self._options, self._tokenizer, columns, mode, schema, reader.values_are_text
        )
        with self._kept_index(spec, reader, schema, take=take) as kept:
            self._kept = kept
            self.reused = NO_REUSED_ROWS if kept is None else kept.reused
            carried = self._carried(schema)
            try:
                yield from self._write(reader, spec, columns, carried, kept)
                if carried is not None and not carried.fits:
                    return False
                if kept is not None:
                    kept.finish(reader)
                if reader.complete:
                    columns.check_all_seen(self._rows.error_rows)
                if carried is not None:
                    carried.finish(self._layout.passthrough)
            finally:
                if carried is not None:
                    carried.close()
        return True

    @property
    def _rows(self) -> IndexWriter:
        assert self._writer is not None, "no step was taken yet"
        return self._writer

    def take_snapshot(self) -> RowsSoFar:
        """End the current index part, and return the index of the rows so far. Raises StorageError.

        Pass the rows to `settle` before they are used.
        """
        return self._rows.take_snapshot()

    def settle(self, rows: RowsSoFar) -> RowsSoFar:
        """Turn rows with repeated custom ids into errors, and give equal sampled rows different work keys.

        Call it for the result of each `take_snapshot`, in the order of the calls. It may run in another thread while
        the input is read.

        Args:
            rows: The rows from `take_snapshot`.

        Returns:
            The same rows, with the new number of error rows.

        Raises:
            StorageError: A part of the index cannot be read or written.
            OutOfMemory: DuckDB exceeded its memory limit.
        """
        self._refused += self._equal.settle(rows.parts, rows.tokens)
        return replace(rows, error_rows=rows.error_rows + self._refused)

    def _opened(self, files: Sequence[InputFile]) -> Reader:
        options, known = self._options, self._options.checked
        how = options.sample, options.strata, options.chunk
        return (known and known.reopen(files, *how)) or open_input(self.job, files, *how)

    def _start_over(self) -> None:
        with storage(self._layout.folder, "prepare"):
            if self._layout.folder.exists():
                self._ops.remove_tree(self._layout.folder)
            self._ops.mkdir(self._layout.folder)

    def _make_folders(self) -> None:
        carried = [self._layout.passthrough, self._layout.spool] if self.job.carried else []
        carried += [self._layout.content_free] if self.job.classify.content_free is not None else []
        with storage(self._layout.folder, "prepare"):
            for folder in (self._layout.index, self._layout.tokens.parent, *carried):
                if folder.exists():
                    self._ops.remove_tree(folder)
                self._ops.mkdir(folder)

    def _inputs(self) -> Sequence[InputFile]:
        if not self.job.input.sql:
            return self._files
        kept = self._layout.folder / "sql.parquet"
        with storage(kept, "keep the rows of the query"):
            self._ops.rename(Path(self._files[0].path), kept)
        return [replace(self._files[0], path=str(kept)).now()]

    def _carried(self, schema: pa.Schema | None) -> JsonSpool | TypedColumns | None:
        names = self.job.carried
        if not names:
            return None
        if schema is None:
            return JsonSpool(names, self._layout.spool, self._ops, self.reused)
        typed = pa.schema([(name, schema.field(name).type) for name in names])
        return TypedColumns(typed, self._layout.passthrough, self._ops, self.reused)

    def _write(
        self,
        reader: Reader,
        spec: RenderSpec,
        columns: Columns,
        carried: JsonSpool | TypedColumns | None,
        kept: KeptIndex | None,
    ) -> Generator[IngestProgress, None, None]:
        job, reused = self.job, self.reused
        how = self._options.max_model_len, self._index_columns(spec), self._ops, job.attempts, reused
        writer = self._writer = IndexWriter(self._layout, *how)
        self._equal.skip_parts(len(reused.parts))
        for facts in reused.facts:
            columns.add(facts.names, facts.found, facts.read)
        workers = self._options.workers or usable_cpus()
        wanted = _Wanted(_chunks(reader, columns.read, kept, carried), job.input.limit)
        pool: RenderPool[InputChunk] = RenderPool(spec, workers, self._on_activity)
        with writer, pool:
            for chunk, rows in pool.map(wanted.chunks()):
                if kept is not None and kept.finish_segment_if_due():
                    writer.end_part()
                    if carried is not None:
                        carried.end_part()
                columns.add(rows.facts.names, rows.facts.found, rows.facts.read_rows)
                times = rows.prompts.answers(job.samples)
                if carried is not None:
                    carried.append(writer.rows, chunk, rows.facts, times)
                writer.append(wanted.place(chunk, len(rows)), rows, times)
                if kept is not None:
                    kept.append(rows)
                keys = rows.prompts.keys_of_new_work()
                yield IngestProgress(writer.rows, chunk.bytes_read, reader.bytes_total, keys)
            row = content_free_row(job, columns.prompt)
            for _, rows in pool.map([] if row is None else [(row, row, 1)]):
                check_rendered(job, rows)
                writer.write_separately(self._layout.content_free, rows)
                at = reader.bytes_total
                yield IngestProgress(writer.rows, at, at, rows.prompts.keys_of_new_work())
            writer.commit()

    def _index_columns(self, spec: RenderSpec) -> pa.Schema:
        asked = self._options.asked
        reasons, tools = asked.reasoning is not None, asked.tool_calls is not None
        labels = asked.scoring is not None and asked.scoring.own_labels
        several = self.job.has_samples
        vectors = spec.fields.endpoints and asked.embedding is not None
        return index_schema(
            spec.fields.endpoints, self.job.attempts, reasons, tools, labels, several, vectors
        )

    def _kept_index(
        self, spec: RenderSpec, reader: Reader, schema: pa.Schema | None, *, take: bool
    ) -> AbstractContextManager[KeptIndex | None]:
        # Jobs with a limit, a query or several samples per row keep nothing
        job = self.job
        if self._keeping is None or job.input.limit is not None or job.input.sql or job.samples > 1:
            return nullcontext()
        settings = _settings(job, self._options, self._tokenizer)
        # These keys choose rows, but do not change how a row is prepared
        for name in ("path", "sql", "limit", "unique_ids"):
            settings["job"]["input"].pop(name, None)
        material = json.dumps(settings, sort_keys=True)
        shape = f"{job.input.unique_ids} {self._index_columns(spec)} {schema}"
        taking = self._layout.index, self._layout.passthrough
        asked = RowsToKeep(spec, material, shape, reader.files, taking if take else None)
        return kept_index(self._keeping, asked, self._ops)

    @property
    def _may_take(self) -> bool:
        # Each row must have a single answer at its first attempt, and no content-free prompt may calibrate it
        job = self.job
        return job.attempts == 1 and not job.has_samples and job.classify.content_free is None

    def finish(self) -> Index:
        """Complete the index after the last step of `steps`, and return it.

        Raises StorageError, OutOfMemory.
        """
        writer, reader, output = self._rows, self._reader, self.job.output
        assert reader is not None, "no step was taken yet"
        errors = self.settle(writer.all_rows()).error_rows
        for rest in (self._layout.spill, self._layout.spool):
            if rest.exists():
                shutil.rmtree(rest)
        job, options, sampling = self.job, self._options, self.job.sampling
        calls, unread_calls = options.calls(job, writer.has_tools)
        index = Index(
            folder=self._layout.folder,
            identity=self._identity,
            rows=writer.rows,
            error_rows=errors,
            total_tokens=writer.total_tokens,
            inputs=reader.files,
            sha256=dict(reader.sha256),
            logprobs=(writer.logprobs or 0) if sampling.asks_logprobs else writer.logprobs,
            answers=None if output.json_schema is None else AnswerSchema(output.json_schema, output.column),
            output=options.output,
            unread_arguments=writer.unread.rows,
            attempts=job.attempts,
            reasoning=options.asked.reasoning,
            tool_calls=calls,
            unread_calls=unread_calls,
            known_rows=writer.known_rows,
            embedding=options.asked.embedding if job.task == "embed" or writer.has_vectors else None,
            scoring=options.asked.scoring,
            samples=job.has_samples and (writer.most_samples > 1 or sampling.asks_samples),
            expected=job.input.expected,
            pairs=options.asked.pairs,
            best=self._best(),
            confidence=sampling.choice if output.confidence else None,
            prompt_logprobs=writer.prompt_logprobs or sampling.asks_prompt_logprobs,
            own_dimensions=writer.own_dimensions,
            engine_class=job.mixes_classes,
            reused=self.reused,
            segments=self._pending_segments,
        )
        index.write_marker(self._ops)
        return index

    @property
    def _pending_segments(self) -> PendingSegments | None:
        kept = self._kept
        if kept is None or not self._may_take or self._equal.has_numbered_rows:
            return None
        return PendingSegments(kept.asked.finished_identity, kept.segments)

    def _best(self) -> BestOf | None:
        job, lists = self.job, not self.job.output.explode
        return BestOf(job.published_samples, job.samples, lists) if lists or job.sampling.chooses else None


def _chunks(
    reader: Reader,
    names: Sequence[str] | None,
    kept: KeptIndex | None,
    carried: JsonSpool | TypedColumns | None,
) -> Iterator[InputChunk]:
    # Files and chunks in the kept index are not prepared again
    if kept is None:
        return reader.chunks(names)
    typed = isinstance(carried, TypedColumns) and not reader.values_are_text
    return kept.chunks(reader, names, typed)


class _Wanted:
    def __init__(self, chunks: Iterator[InputChunk], limit: int | None) -> None:
        self._chunks, self._limit = chunks, limit
        self._file, self._rows_of_file = "", 0
        self.rows = 0

    def chunks(self) -> Iterator[tuple[InputChunk, InputChunk, int] | None]:
        # The number of rows in a chunk is only known once a worker has read it. None is yielded before a
        # chunk that may reach the limit. The pool resumes the generator when all earlier rows are counted, so
        # no row beyond the limit is read
        reserved = 0
        for chunk in self._chunks:
            most = chunk.most_rows
            if self._limit is not None and reserved + most > self._limit:
                yield None
                reserved, most = self.rows, min(most, self._limit - self.rows)
            yield chunk, chunk, most
            reserved += most
            if reserved == self._limit:
                yield None
                reserved = self.rows
            if reserved == self._limit:
                return

    def place(self, chunk: InputChunk, rows: int) -> RowPlace:
        if chunk.file != self._file:
            self._file, self._rows_of_file = chunk.file, 0
        first = self._rows_of_file if chunk.first_row is None else chunk.first_row
        self._rows_of_file += rows
        self.rows += rows
        return RowPlace(chunk.file, first)
