"""The checks of a job's input: its files or its query, the columns that the job names, and the number of its rows.

The last one is a guard: an upstream failure that leaves an input without rows must not replace a good result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import pyarrow as pa

from batchinfer.core.errors import TooFewRows
from batchinfer.core.request import RowError
from batchinfer.core.wording import counted
from batchinfer.data.index.index import MARKER
from batchinfer.data.input.job_input import input_files, open_input
from batchinfer.data.input.reader import Reader
from batchinfer.data.input.sql import query_columns
from batchinfer.data.prompts.columns import Columns, choose_prompts
from batchinfer.data.prompts.sampling_fields import CHECKS
from batchinfer.data.results.published import published_input_rows
from batchinfer.data.storage.state import StateFolder
from batchinfer.job import Job
from batchinfer.plan.setup.job_setup import Setup

SPACE_PER_INPUT_BYTE = 2  # at least: tokens and carried columns take about the input's size each


@dataclass(frozen=True, slots=True)
class InputFacts:
    """An input that has the columns that the job names. `files` is 0 for a query, and `reader` None."""

    files: int
    bytes: int
    warnings: tuple[str, ...]
    reader: Reader | None = None  # has read headers and footers


def check_input(job: Job, setup: Setup, state: StateFolder) -> InputFacts:
    """Raises InputMissing, InputCorrupt, StorageError, TooFewRows for files without rows, and JobFileError for columns
    that the input lacks."""
    if job.input.sql is not None:
        names = query_columns(job.input.sql, job.source)
        schema = pa.schema([(name, pa.null()) for name in names])
        _, columns = choose_prompts(job, setup.tokenizer, schema, lambda: "table")
        return InputFacts(0, 0, tuple(_warnings(job, columns)))
    files = input_files(job)
    size = sum(file.size for file in files)
    indexed = any(state.scratch.glob(f"*/{MARKER}"))  # then the tokens of an unfinished run are there already
    if not indexed:
        state.check_space(SPACE_PER_INPUT_BYTE * size)
    reader = open_input(job, files)
    _, columns = choose_prompts(job, setup.tokenizer, reader.schema(), reader.shape)
    _look_for(job, columns, reader)
    return InputFacts(len(files), size, tuple(_warnings(job, columns)), reader)


def _look_for(job: Job, columns: Columns, reader: Reader) -> None:
    """Read until every referenced column has appeared, usually within the first batch. Raises TooFewRows."""
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
    """Prompts that are made of the right answer measure nothing."""
    name = job.input.expected
    if name is None or job.requests or (columns.send is not None and name not in columns.send):
        return
    how = f"the column {name!r}" if columns.send is not None else f"`row`, which holds the column {name!r}"
    yield (
        f"prompts or parameters are made of {how}, the right answer by input.expected: a model that is shown it "
        "is not measured, and a row whose label changes is computed again"
    )


def _idle_parameters(columns: Columns) -> Iterator[str]:
    """A column that looks like a sampling parameter and that nothing uses may have been meant as one."""
    used = {name for _, name in columns.wanted} | set(columns.variables) | set(columns.send or columns.known)
    idle = [name for name in columns.known if name in CHECKS and name not in used]
    if idle:
        yield (
            f"the input has the column{'s' * (len(idle) > 1)} {', '.join(idle)}, but the job ignores "
            f"{'them' if len(idle) > 1 else 'it'}; to let rows set their own sampling parameters, name "
            f"{'them' if len(idle) > 1 else 'it'} in sampling.from_columns"
        )


def check_any_rows(job: Job, rows: int) -> None:
    """Raise TooFewRows for an input without rows, unless the job allows that."""
    if not rows and not job.input.allow_empty:
        where = job.place("input.path" if job.input.sql is None else "input.sql")
        raise TooFewRows(
            f"{where}: the input has no rows; set input.allow_empty: true to publish an empty result"
        )


def check_enough_rows(job: Job, rows: int) -> None:
    """Check the number of rows of the whole input.

    Args:
        job: The job; a trial has no `input.min_rows`.
        rows: Input rows, error rows included.

    Raises:
        TooFewRows: The input has no rows, or fewer than `input.min_rows`.
        OutputConflict: A newer version of batchinfer wrote the published result.
    """
    check_any_rows(job, rows)
    asked = job.input.min_rows
    if isinstance(asked, float):
        published = published_input_rows(job.output.path)
        if published is None:
            return
        # The share counts as it is written: 100 * 0.29 is less than 29 in floats
        least = math.ceil(published * Fraction(str(asked)))
        why = f" ({asked} of the {counted(published, 'row')} of the result in {job.output.path})"
    else:
        least, why = asked or 0, ""
    if rows < least:
        raise TooFewRows(
            f"{job.place('input.min_rows')}: the input has {counted(rows, 'row')}, and the job needs at least "
            f"{least:,}{why}; nothing is published. Complete the input, or lower input.min_rows"
        )
