"""The ingest half of a job: input files in, a complete index out, in bounded memory.

    reader ─▶ chunks ─▶ render workers (rows, templates, tokenizer) ─▶ token store, index ─▶ marker

This process cuts files into chunks and writes what comes back. All that is done for each row is done in the workers.

A complete index of the same identity is used again; anything less is thrown away and made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from batchinfer.core.reasoning import Reasoning
from batchinfer.core.sampling import SamplingParams
from batchinfer.data.index.duplicates import number_equal_samples, refuse_repeated_ids
from batchinfer.data.index.index import AnswerSchema, Index, Layout, TokensLacking, index_schema
from batchinfer.data.index.keeping import Keeping, KeptIndex, kept_index
from batchinfer.data.index.passthrough import JsonSpool, TypedColumns
from batchinfer.data.index.token_store import TokenStore
from batchinfer.data.index.writer import IndexWriter, RowPlace
from batchinfer.data.input.chunk import DEFAULT_SIZE, ChunkSize, InputChunk
from batchinfer.data.input.input_file import InputFile
from batchinfer.data.input.job_input import input_files, open_input
from batchinfer.data.input.openai import CHAT_URL, TEXT_URL, openai_defaults
from batchinfer.data.input.reader import Reader, SampleSize, Strata
from batchinfer.data.input.sql import materialise
from batchinfer.data.prompts.builder import Mode, PromptPlan
from batchinfer.data.prompts.columns import Columns, choose_prompts
from batchinfer.data.prompts.keys import CONSTRAINT_RULES
from batchinfer.data.prompts.prepare import Limits
from batchinfer.data.prompts.render_pool import Happened, RenderPool
from batchinfer.data.prompts.render_worker import RenderSpec
from batchinfer.data.storage.durable import FileOps, sha256_of, storage
from batchinfer.data.tokenizer.tokenizer import Tokenizer
from batchinfer.job.prompt import PromptSection
from batchinfer.machine.cpus import usable_cpus

if TYPE_CHECKING:
    from batchinfer.job import Job

INGEST_FORMAT = 6  # raise it when equal input would give another index


@dataclass(frozen=True, slots=True)
class IngestOptions:
    """Options that the job file does not have. `context` is the digest that enters every key; `vocab_size` is the
    model's.

    `now` is what a chat template's `strftime_now` tells; `workers` None: as many as there are cores.
    """

    context: bytes
    max_model_len: int
    vocab_size: int
    now: datetime
    workers: int | None = None
    row_timeout_s: float = 10.0
    sample: SampleSize | None = None  # only the first rows of each file, to look at them
    strata: Strata | None = None  # only a part of the rows, from everywhere
    output: str = "tokens"  # the name of the kind of answers
    reasoning: Reasoning | None = None  # how the checkpoint marks it
    chunk: ChunkSize = DEFAULT_SIZE
    checked: Reader | None = None  # has read headers and footers of the same files


@dataclass(frozen=True, slots=True)
class IngestProgress:
    """How far ingest got; bytes are those of the input files as they lie on disk."""

    rows: int
    bytes_read: int
    bytes_total: int
    keys: bytes = b""  # of the rows that came last, 32 bytes each; an error row has none


def ingest(
    job: Job,
    tokenizer: Tokenizer,
    options: IngestOptions,
    scratch: Path,
    progress: Callable[[IngestProgress], None] | None = None,
    ops: FileOps | None = None,
    happened: Happened | None = None,
    keeping: Keeping | None = None,
) -> Index:
    """The complete index of the job's input, in `scratch/<its id>/`. `tokenizer` is the model's; `happened` is told
    what each worker did, by `time.perf_counter`. `keeping`: rows that the job's last index knew are not prepared again,
    and what this one knows is kept for the next.

    Raises InputMissing (66), InputCorrupt (65), JobFileError (78: columns that no row has, a failing query),
    StorageError (74). A bad row raises nothing: it is an error row of the index.
    """
    files = job_files(job, scratch)
    identity = _identity(job, options, tokenizer, files)
    folder = scratch / identity[:16]
    found = Index.find(folder, identity)
    if found is not None:
        return found
    while True:
        new = _Ingest(job, options, tokenizer, files, identity, folder, ops or FileOps(), happened, keeping)
        try:
            return new.run(progress or _silent)
        except TokensLacking as lacking:
            keeping = keeping and keeping.forgetting(lacking.keys)


def job_files(job: Job, scratch: Path) -> list[InputFile]:
    """The job's input files, or the one in `scratch` with the rows of its query.

    A query runs anew at every start: an interrupted job must not publish yesterday's rows as today's.
    """
    if job.input.sql is None:
        return input_files(job)
    memory = None if job.input.sql_memory == "auto" else job.input.sql_memory
    queried = materialise(job.input.sql, job.source, scratch / "query" / "rows.parquet", memory)
    return [
        replace(queried, mtime_ns=0, ctime_ns=0, inode=0)
    ]  # when the query ran says nothing about its rows


def over_files(job: Job, files: Sequence[InputFile]) -> Job:
    """The job over these files of its own, `job_files` or a copy of them: then its query does not run again."""
    if job.input.sql is None:
        return job
    source = job.input.model_copy(update={"sql": None, "path": files[0].path, "format": "parquet"})
    return job.model_copy(update={"input": source})


def _identity(job: Job, options: IngestOptions, tokenizer: Tokenizer, files: Sequence[InputFile]) -> str:
    """sha256 over all that shapes the index. The rows of a query count by their content."""
    inputs = [f.to_json() | ({"sha256": sha256_of(Path(f.path))} if job.input.sql else {}) for f in files]
    value = _settings(job, options, tokenizer) | {"inputs": inputs}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _settings(job: Job, options: IngestOptions, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that shapes the index but the input."""
    value: dict[str, Any] = {
        "format": [INGEST_FORMAT, CONSTRAINT_RULES],
        "job": json.loads(job.identity_json()),
        "context": options.context.hex(),
        "limits": [options.max_model_len, options.vocab_size],
        "tokenizer": tokenizer.fingerprint,
        "now": options.now.date().isoformat() if tokenizer.tells_the_day else None,
    }
    if options.reasoning is not None:
        value["reasoning"] = options.reasoning.to_json()
    return value


def _silent(_: IngestProgress) -> None:
    """Ignore progress, for callers that do not show it."""


class _Ingest:
    """One run of ingest."""

    def __init__(
        self,
        job: Job,
        options: IngestOptions,
        tokenizer: Tokenizer,
        files: Sequence[InputFile],
        identity: str,
        folder: Path,
        ops: FileOps,
        happened: Happened | None,
        keeping: Keeping | None,
    ) -> None:
        self._job, self._happened = job, happened
        self._keeping = keeping
        self._options = options
        self._tokenizer = tokenizer
        self._files = files
        self._identity = identity
        self._layout = Layout(folder)
        self._ops = ops

    def run(self, progress: Callable[[IngestProgress], None]) -> Index:
        self._start_over()
        reader = self._opened()
        schema = reader.schema()
        mode, columns = choose_prompts(self._job, self._tokenizer, schema, reader.shape)
        carried = self._carried(schema)
        try:
            writer = self._write(reader, schema, columns, mode, carried, progress)
            if reader.complete:
                columns.check_all_seen(failed=writer.error_rows)
            if carried is not None:
                carried.finish(self._layout.passthrough)
        finally:
            if carried is not None:
                carried.close()
        return self._finish(writer, reader)

    def _opened(self) -> Reader:
        options, files, known = self._options, self._inputs(), self._options.checked
        how = options.sample, options.strata, options.chunk
        return (known and known.again(files, *how)) or open_input(self._job, files, *how)

    def _start_over(self) -> None:
        with storage(self._layout.folder, "prepare"):
            if self._layout.folder.exists():
                self._ops.remove_tree(self._layout.folder)
            for folder in (self._layout.index, self._layout.tokens.parent):
                self._ops.mkdir(folder)
            if self._job.output.columns:
                self._ops.mkdir(self._layout.passthrough)
                self._ops.mkdir(self._spool)

    @property
    def _spool(self) -> Path:
        return self._layout.folder / "spool"

    def _inputs(self) -> Sequence[InputFile]:
        if not self._job.input.sql:
            return self._files
        kept = self._layout.folder / "sql.parquet"
        with storage(kept, "keep the rows of the query"):
            self._ops.rename(Path(self._files[0].path), kept)
        return [InputFile.of(str(kept), self._files[0].name, self._files[0].format, kept.stat())]

    def _carried(self, schema: pa.Schema | None) -> JsonSpool | TypedColumns | None:
        names = self._job.output.columns
        if not names:
            return None
        if schema is None:
            return JsonSpool(names, self._spool, self._ops)
        typed = pa.schema([(name, schema.field(name).type) for name in names])
        return TypedColumns(typed, self._layout.passthrough, self._ops)

    def _write(
        self,
        reader: Reader,
        schema: pa.Schema | None,
        columns: Columns,
        mode: Mode,
        carried: JsonSpool | TypedColumns | None,
        progress: Callable[[IngestProgress], None],
    ) -> IndexWriter:
        spec = self._worker_spec(columns, mode, schema, reader.values_are_text)
        attempts, reasons = self._job.attempts, self._options.reasoning is not None
        index_columns = index_schema(mode == "openai", attempts, reasons)
        longest = self._options.max_model_len
        writer = IndexWriter(self._layout, longest, index_columns, self._ops, attempts)
        workers = self._options.workers or usable_cpus()
        with self._kept(spec) as kept:
            if kept is None:
                chunks = reader.chunks(columns.read)
            else:
                spec, typed = kept.spec, isinstance(carried, TypedColumns) and not reader.values_are_text
                chunks = kept.chunks(reader, columns.read, typed)
            wanted = _Wanted(chunks, self._job.input.limit)
            pool: RenderPool[InputChunk] = RenderPool(spec, workers, self._happened)
            with writer, pool:
                for chunk, rows in pool.map(wanted.chunks()):
                    columns.add(rows.facts.names, rows.facts.found, rows.facts.read_rows)
                    if carried is not None:
                        carried.append(writer.rows, chunk, rows.facts)
                    writer.append(wanted.place(chunk, len(rows)), rows)
                    if kept is not None:
                        kept.append(rows)
                    keys = rows.prompts.keys_of_work()
                    progress(IngestProgress(writer.rows, chunk.bytes_read, reader.bytes_total, keys))
                writer.commit()
            if kept is not None:
                kept.check_samples(writer.parts, self._layout.folder / "spill")
                kept.commit(reader)
        return writer

    def _kept(self, spec: RenderSpec) -> AbstractContextManager[KeptIndex | None]:
        """Open what the last index knew, where that is asked for. Files and chunks of rows that a limit cuts off, or
        that a query gave, are not known as such."""
        if self._keeping is None:
            return nullcontext()
        job, ops = self._job, self._ops
        material = json.dumps(_settings(job, self._options, self._tokenizer), sort_keys=True)
        whole = job.input.limit is None and job.input.sql is None
        return kept_index(self._keeping, spec, material, job.attempts, ops, whole=whole)

    def _worker_spec(
        self, columns: Columns, mode: Mode, schema: pa.Schema | None, values_are_text: bool
    ) -> RenderSpec:
        prompt, options = self._job.prompt, self._options
        plan = self._prompt_plan(columns, mode, values_are_text)
        truncate = prompt.truncate if prompt else "error"
        own = self._job.model.max_model_len is not None
        limits = Limits(options.max_model_len, options.vocab_size, truncate, options.context, own)
        model, definition = self._job.model.path, self._tokenizer.definition
        as_text = self._job.output.columns if schema is None or values_are_text else ()
        fields = columns.fields(as_text, endpoints=mode == "openai", declared=schema is not None)
        source = str(self._job.source)
        return RenderSpec(model, definition, plan, limits, fields, source, options.row_timeout_s)

    def _prompt_plan(self, columns: Columns, mode: Mode, values_are_text: bool) -> PromptPlan:
        prompt = self._job.prompt or PromptSection()
        return PromptPlan(
            mode=mode,
            params=self._job.params(),
            system=prompt.system,
            user=prompt.user,
            column=columns.prompt,
            overrides=columns.overrides,
            values_are_text=values_are_text,
            by_url=self._by_url(),
            one_schema=self._job.output.json_schema is not None,
            now=self._options.now,
            fits=self._job.sampling.fits,
            chat=prompt.chat,
            chat_template=self._job.chat_template,
            arguments=prompt.arguments,
            argument_columns=prompt.template_arguments_from_columns,
            ladder=self._job.on_invalid,
            reasoning=self._options.reasoning,
        )

    def _by_url(self) -> dict[str, SamplingParams]:
        given, length = self._job.given_params(), self._options.max_model_len
        return {url: openai_defaults(url, given, length) for url in (CHAT_URL, TEXT_URL)}

    def _finish(self, writer: IndexWriter, reader: Reader) -> Index:
        spill, parts, output = self._layout.folder / "spill", writer.parts, self._job.output
        errors, threads = writer.error_rows, max(2, usable_cpus())
        if self._job.input.unique_ids:
            errors += refuse_repeated_ids(parts, spill, self._ops, threads)
        tokens, context = TokenStore(self._layout.tokens), self._options.context
        number_equal_samples(parts, tokens, context, spill, self._ops, threads, attempts=self._job.attempts)
        for rest in (spill, self._spool):
            if rest.exists():
                shutil.rmtree(rest)
        index = Index(
            self._layout.folder,
            self._identity,
            writer.rows,
            errors,
            writer.total_tokens,
            reader.files,
            dict(reader.sha256),
            (writer.logprobs or 0) if self._job.sampling.asks_logprobs else writer.logprobs,
            None if output.json_schema is None else AnswerSchema(output.json_schema, output.column),
            self._options.output,
            writer.unread.rows,
            self._job.attempts,
            self._options.reasoning,
        )
        index.write_marker(self._ops)
        return index


class _Wanted:
    """The chunks of the rows that a job wants, and how many rows they had."""

    def __init__(self, chunks: Iterator[InputChunk], limit: int | None) -> None:
        self._chunks, self._limit = chunks, limit
        self._file, self._rows_of_file = "", 0
        self.rows = 0

    def chunks(self) -> Iterator[tuple[InputChunk, InputChunk, int] | None]:
        """Yield each chunk (which is its own tag), and how many of its rows are wanted.

        How many rows a chunk has is known once it was read. Where it may reach the limit, None comes before it: it is
        asked for only when the rows of all before it are counted, so that no row beyond the limit is ever read.
        """
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
        """Count the rows of the next chunk; where they stand."""
        if chunk.file != self._file:
            self._file, self._rows_of_file = chunk.file, 0
        first = self._rows_of_file if chunk.first_row is None else chunk.first_row
        self._rows_of_file += rows
        self.rows += rows
        return RowPlace(chunk.file, first)
