"""The check of a job's input files, or of its query, and of the columns that the job names, before rows are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from batchinfer.core.request import RowError
from batchinfer.data.index.index import MARKER
from batchinfer.data.input.job_input import input_files, open_input
from batchinfer.data.input.reader import Reader
from batchinfer.data.input.sql import query_columns
from batchinfer.data.prompts.columns import Columns, choose_prompts
from batchinfer.data.prompts.sampling_fields import CHECKS
from batchinfer.data.storage.state import StateFolder
from batchinfer.job import Job
from batchinfer.plan.setup.enough_rows import check_any_rows
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
