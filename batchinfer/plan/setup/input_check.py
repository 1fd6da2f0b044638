"""Checks a job's input: files or query, columns, number of rows, and how the first rows become prompts.

The check of the number of rows is a safeguard: an empty input after an upstream failure must not replace a
good result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchinfer.core.errors import ErrorBudgetExceeded, TooFewRows
from batchinfer.core.request import RowError
from batchinfer.core.wording import counted
from batchinfer.filesystem.location import Location
from batchinfer.filesystem.state import StateFolder
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.input.job_input import input_files, open_input
from batchinfer.input.prompts.columns import Columns, choose_prompts
from batchinfer.input.prompts.sampling_fields import CHECKS
from batchinfer.input.reader import Reader, SampleSize
from batchinfer.input.sql import query_columns
from batchinfer.job import Job
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.store.index.index import INPUT_ROW, MARKER, Index
from batchinfer.store.index.ingest import ingest
from batchinfer.store.results.error_budget import Budget, budget_text
from batchinfer.store.results.error_summary import summarise_errors
from batchinfer.store.results.join import ErrorCounts
from batchinfer.store.results.published import count_published_input_rows

FIRST_ROWS = 512  # per file: one batch of each format
SPACE_PER_INPUT_BYTE = 2  # lower bound: tokens and copied columns take about the size of the input each


@dataclass(frozen=True, slots=True)
class InputFacts:
    """The files of an input that has passed all checks.

    Attributes:
        files: Number of files. 0 for a query.
        bytes: Total size of the files. 0 for a query.
        warnings: Warnings for the user.
        reader: A reader of the files that has already read their headers and footers. A run uses it to save time. None
            for a query.
    """

    files: int
    bytes: int
    warnings: tuple[str, ...]
    reader: Reader | None = None


def check_input(job: Job, setup: Setup, state: StateFolder) -> InputFacts:
    """Check the job's input files or query, and that they have the columns that the job names.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        state: The job's state folder, whose disk must have space for the tokens.

    Raises:
        InputMissing: A file is missing.
        InputCorrupt: A file is damaged.
        StorageError: A file cannot be read, or the disk is too full.
        TooFewRows: The files have no rows.
        JobFileError: The input lacks a column.
    """
    if job.input.sql is not None:
        names = query_columns(job.input.sql, job.source)
        schema = pa.schema([(name, pa.null()) for name in names])
        _, columns = choose_prompts(job, setup.tokenizer, schema, lambda: "table")
        return InputFacts(0, 0, tuple(_warnings(job, columns)))
    files = input_files(job)
    size = sum(file.size for file in files)
    indexed = any(state.scratch.glob(f"*/{MARKER}"))  # an unfinished run has stored the tokens already
    if not indexed:
        state.check_space(SPACE_PER_INPUT_BYTE * size)
    reader = open_input(job, files)
    _, columns = choose_prompts(job, setup.tokenizer, reader.schema(), reader.shape)
    _look_for(job, columns, reader)
    return InputFacts(len(files), size, tuple(_warnings(job, columns)), reader)


def _look_for(job: Job, columns: Columns, reader: Reader) -> None:
    rows = 0
    for batch in reader.batches(limit=job.input.limit):
        rows += len(batch.rows)
        for row in batch.rows:
            if not isinstance(row, RowError):
                columns.note(row)
        if not columns.missing:
            return
    check_any_rows(job, rows)
    columns.check_all_seen()


def _warnings(job: Job, columns: Columns) -> Iterator[str]:
    yield from _shown_answers(job, columns)
    yield from _idle_parameters(columns)


def _shown_answers(job: Job, columns: Columns) -> Iterator[str]:
    name = job.input.expected
    if name is None or job.requests or (columns.send is not None and name not in columns.send):
        return
    how = f"the column {name!r}" if columns.send is not None else f"`row`, which holds the column {name!r}"
    yield (
        f"prompts or parameters are made of {how}, the right answer by input.expected: a model that is shown it "
        "is not measured, and a row whose label changes is computed again"
    )


def _idle_parameters(columns: Columns) -> Iterator[str]:
    used = {name for _, name in columns.wanted} | set(columns.variables) | set(columns.send or columns.known)
    idle = [name for name in columns.known if name in CHECKS and name not in used]
    if idle:
        yield (
            f"the input has the column{'s' * (len(idle) > 1)} {', '.join(idle)}, but the job ignores "
            f"{'them' if len(idle) > 1 else 'it'}; to let rows set their own sampling parameters, name "
            f"{'them' if len(idle) > 1 else 'it'} in sampling.from_columns"
        )


def check_any_rows(job: Job, rows: int) -> None:
    """Raise TooFewRows if the input has no rows and the job does not allow an empty input.

    Args:
        job: The job.
        rows: Rows of the input.
    """
    if not rows and not job.input.allow_empty:
        where = job.place("input.path" if job.input.sql is None else "input.sql")
        raise TooFewRows(
            f"{where}: the input has no rows; set input.allow_empty: true to publish an empty result"
        )


def check_enough_rows(job: Job, rows: int) -> None:
    """Check that the whole input has at least `input.min_rows` rows.

    If `input.min_rows` is a fraction, the minimum is that share of the rows of the published result.

    Args:
        job: The job. A trial run has no `input.min_rows`.
        rows: Rows of the input, error rows included.

    Raises:
        TooFewRows: The input has no rows, or fewer than `input.min_rows`.
        OutputConflict: A newer version of batchinfer wrote the published result, so its rows cannot be counted.
    """
    check_any_rows(job, rows)
    asked = job.input.min_rows
    if isinstance(asked, float):
        published = count_published_input_rows(Location.at(job.output.path))
        if published is None:
            return
        # Fractions avoid rounding: 100 * 0.29 is less than 29 in floats
        least = math.ceil(published * Fraction(str(asked)))
        why = f" ({asked} of the {counted(published, 'row')} of the result in {job.output.path})"
    else:
        least, why = asked or 0, ""
    if rows < least:
        raise TooFewRows(
            f"{job.place('input.min_rows')}: the input has {counted(rows, 'row')}, and the job needs at least "
            f"{least:,}{why}; nothing is published. Complete the input, or lower input.min_rows"
        )


def first_index(job: Job, setup: Setup, scratch: Path, rows: int) -> Index:
    """Read, render and tokenise the first rows of every input file as a run does, and return their index.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        scratch: Folder for the files of the index.
        rows: Maximum number of rows per file.
    """
    options = setup.ingest_options(workers=1, sample=SampleSize(rows))
    return ingest(job, setup.tokenizer, options, scratch)


def dry_run(job: Job, setup: Setup) -> list[str]:
    """Read, render and tokenise the first rows of every input file, and report how many would become error rows.

    No answers are computed. The rows of a query are not checked. Raises the errors that a run would raise.
    ErrorBudgetExceeded is raised only if all rows were checked.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.

    Returns:
        Lines for the user.
    """
    if job.input.sql is not None:
        return ["rows: not checked here; the rows of a query (input.sql) are checked when the job runs"]
    with temporary_folder("validate") as scratch:
        index = first_index(job, setup, Path(scratch), FIRST_ROWS)
        errors, counts = summarise_errors(index.index_parts, index.samples), _CountedRows.of(index)
    told = index.notices
    complete = _is_complete(index, job.input.limit, counts.rows)
    budget = Budget(index.rows, job.on_error.max_error_rate, job.on_error.publish)
    if complete and budget.exceeded(index.error_rows):
        failed = ErrorCounts(index.rows, index.error_rows, 0, 0)
        raise ErrorBudgetExceeded(budget_text(failed, budget, errors))
    which = (
        f"all {counts.rows:,}"
        if complete
        else f"the first {FIRST_ROWS} of each file, {counts.rows:,} in all,"
    )
    answers = f", to get {index.rows - index.error_rows:,} answers" if index.samples else ""
    if not index.error_rows:
        return [*told, f"rows: {which} can be run{answers}"]
    return [*told, f"rows: {counts.bad:,} of {which} would become error rows{answers}:", errors.text()]


class _CountedRows(NamedTuple):
    """The number of input rows in an index, and the number of input rows that cannot run.

    The index itself has more rows if the job asks for several samples per input row.

    Attributes:
        rows: Number of input rows.
        bad: Number of input rows that cannot run.
    """

    rows: int
    bad: int

    @classmethod
    def of(cls, index: Index) -> _CountedRows:
        if not index.samples or not index.rows:
            return cls(index.rows, index.error_rows)
        found = pq.read_table(list(index.index_parts), columns=[INPUT_ROW.name, "error_code"])
        bad = found.filter(pc.is_valid(found.column("error_code")))
        each = (pc.count_distinct(table.column(INPUT_ROW.name)).as_py() for table in (found, bad))
        return cls(*each)


def _is_complete(index: Index, limit: int | None, rows: int) -> bool:
    whole = len(index.sha256) == len(index.inputs)
    return whole or (limit is not None and limit <= FIRST_ROWS and rows == limit)
