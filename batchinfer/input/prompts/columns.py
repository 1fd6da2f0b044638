"""Chooses the input columns that a job reads, and checks that the input has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jinja2 import nodes

from batchinfer.core.errors import JobFileError, Mistake
from batchinfer.core.text import nearest
from batchinfer.input.prompts.builder import ROW_VARIABLE, Mode, template_columns
from batchinfer.input.prompts.chat_template import row_environment
from batchinfer.input.prompts.mode import choose_mode
from batchinfer.input.prompts.row_facts import MOST_NAMES, RowFields
from batchinfer.input.reader import Shape
from batchinfer.input.rows import Values
from batchinfer.input.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from batchinfer.job import Job


@dataclass(slots=True)
class Columns:
    """The input columns that a job uses, and the columns found in the input until now.

    JSON lines have no schema. Their columns are only known from the rows.

    Args:
        job: The job file, for messages.
        prompt: The column of the prompt, or None if templates make it.
        id: The column of the row ids, or None.
        send: The columns that render workers need, or None for all.
        read: The columns to decode, or None for all, as for an input without a schema.
        overrides: Pairs of a sampling parameter and the column that sets it.
        wanted: Pairs of a key of the job file and the column that it names.
        variables: The columns that the templates require.
        unseen: For an input without a schema, the columns in `wanted` and `variables` that no row has had yet.
        known: The names of columns that were found, in order, up to a maximum number.
        rows: The number of rows that were read.
    """

    job: str
    prompt: str | None
    id: str | None
    send: tuple[str, ...] | None
    read: tuple[str, ...] | None
    overrides: tuple[tuple[str, str], ...]
    wanted: tuple[tuple[str, str], ...]
    variables: tuple[str, ...]
    unseen: set[str]
    known: dict[str, None] = field(default_factory=dict)
    rows: int = 0

    def note(self, row: Values) -> None:
        """Record the columns of one row as found."""
        self.add(row, row.keys(), 1)

    def add(self, names: Iterable[str], found: Collection[str], rows: int) -> None:
        """Record the columns of several rows as found.

        Args:
            names: The first column names of the rows, in order, for messages.
            found: The columns of `unseen` that occurred in the rows.
            rows: The number of rows.
        """
        self.rows += rows
        if self.unseen:
            self.unseen.difference_update(found)
        if len(self.known) < MOST_NAMES:
            self.known.update(dict.fromkeys(names))

    def fields(self, carried: Sequence[str], endpoints: bool, declared: bool) -> RowFields:
        """Return the values that render workers must take from each row and return to the driver.

        Args:
            carried: The columns that are copied to the results as text.
            endpoints: True if the workers return the endpoint of each OpenAI request.
            declared: True if the input has a schema.
        """
        watched = None if declared else frozenset(self.unseen)
        return RowFields(self.send, self.id, tuple(carried), not declared, endpoints, watched)

    @property
    def missing(self) -> bool:
        """True if a key of the job file names a column that no row has had yet."""
        return any(name in self.unseen for _, name in self.wanted)

    def check_all_seen(self, failed: int = 0) -> None:
        """Raise JobFileError if no row of the input has a column that the job names. Called after all rows were read.

        A column that only templates name may be missing, unless all rows failed.

        Args:
            failed: The number of rows that failed.
        """
        missing = [named for named in self.wanted if named[1] in self.unseen]
        if missing or failed >= self.rows:
            missing += [("prompt", name) for name in self.variables if name in self.unseen]
        if missing and self.rows:
            raise JobFileError(self.job, [_missing(where, name, list(self.known)) for where, name in missing])


def choose_prompts(
    job: Job, tokenizer: Tokenizer, schema: pa.Schema | None, shape: Callable[[], Shape]
) -> tuple[Mode, Columns]:
    """Determine where the job's prompts come from, and which columns to read.

    Raises as `choose_mode` and `choose_columns`.

    Args:
        job: The job.
        tokenizer: The tokenizer of the checkpoint.
        schema: The schema of the input, or None.
        shape: Returns "openai" if the input has OpenAI requests, else "table".
    """
    mode = choose_mode(job, tokenizer, shape)
    return mode, choose_columns(job, mode, schema)


def choose_columns(job: Job, mode: Mode, schema: pa.Schema | None) -> Columns:
    """Determine the input columns that a job uses, and check that a schema has them.

    Args:
        job: The job.
        mode: The source of its prompts.
        schema: The schema of the input, or None if the columns are only known from its rows.

    Raises:
        JobFileError: The schema lacks a column.
    """
    prompt = job.prompt
    column = getattr(prompt, mode, None) if mode in ("messages", "text", "token_ids") else None
    identifier = "custom_id" if mode == "openai" else job.input.id
    used = template_columns(prompt.system) | template_columns(prompt.user) if prompt else set()
    _refuse_columns(job, mode)
    wanted = tuple(_wanted(job, mode, column))
    variables = _needed_variables(job, used)
    parameters = {name for _, name in (*job.sampling.from_columns, *_argument_columns(job))}
    parameters.update((*_tools_column(job), *(name for _, name in _of_scores(job))))
    if job.model.adapter_from_column is not None:
        parameters.add(job.model.adapter_from_column)
    whole = mode == "openai" or ROW_VARIABLE in used
    send = None if whole else tuple(sorted({*used, *parameters, *([column] if column else [])}))
    read = None
    unseen = {*variables, *(name for _, name in wanted)}
    if schema is not None:
        _check_schema(job, schema, wanted, variables)
        kept = {*(send or schema.names), *job.carried, identifier}
        read, unseen = tuple(name for name in schema.names if name in kept), set()
    known = dict.fromkeys(schema.names if schema is not None else ())
    overrides = job.sampling.parameter_columns
    return Columns(
        str(job.source), column, identifier, send, read, overrides, wanted, variables, unseen, known
    )


def _refuse_columns(job: Job, mode: Mode) -> None:
    if mode == "openai" and job.sampling.from_columns:
        message = "is not for OpenAI batch files: the body of each request holds its parameters"
        raise JobFileError(str(job.source), [Mistake("sampling.from_columns", message, hint="remove it")])
    if mode == "openai" and job.input.expected is not None:
        message = "is not for OpenAI batch files: their requests have no other fields"
        raise JobFileError(str(job.source), [Mistake("input.expected", message, hint="remove it")])


def _wanted(job: Job, mode: Mode, column: str | None) -> Iterator[tuple[str, str]]:
    if job.input.id is not None and mode != "openai":
        yield "input.id", job.input.id
    if column is not None:
        yield f"prompt.{mode}", column
    yield from (("sampling.from_columns", name) for _, name in job.sampling.from_columns)
    yield from (("prompt.template_arguments_from_columns", name) for _, name in _argument_columns(job))
    yield from (("prompt.tools_from_column", name) for name in _tools_column(job))
    if job.model.adapter_from_column is not None and mode != "openai":
        yield "model.adapter_from_column", job.model.adapter_from_column
    yield from _of_scores(job)
    if job.input.expected is not None:
        yield "input.expected", job.input.expected
    yield from (("output.columns", name) for name in job.output.columns)


def _argument_columns(job: Job) -> tuple[tuple[str, str], ...]:
    return () if job.prompt is None else job.prompt.template_arguments_from_columns


def _tools_column(job: Job) -> tuple[str, ...]:
    name = None if job.prompt is None else job.prompt.tools_from_column
    return () if name is None else (name,)


def _of_scores(job: Job) -> Iterator[tuple[str, str]]:
    if job.score.continuation is not None:
        yield "score.continuation", job.score.continuation
    if job.classify.choices_from_column is not None:
        yield "classify.choices_from_column", job.classify.choices_from_column
    if job.rerank.document is not None:
        yield "rerank.document", job.rerank.document


def _needed_variables(job: Job, used: set[str]) -> tuple[str, ...]:
    # Templates that handle missing columns themselves require none
    if job.prompt is None or _asks_whether_defined(job.prompt.system, job.prompt.user):
        return ()
    return tuple(sorted(used - {ROW_VARIABLE}))


def _check_schema(
    job: Job, schema: pa.Schema, wanted: Sequence[tuple[str, str]], variables: Sequence[str]
) -> None:
    names = list(schema.names)
    named = [*wanted, *(("prompt", name) for name in variables)]
    missing = [_missing(where, name, names) for where, name in named if name not in names]
    if missing:
        raise JobFileError(str(job.source), missing)


def _asks_whether_defined(*sources: str | None) -> bool:
    for source in sources:
        tree: Any = row_environment().parse(source or "")
        tests = {test.name for test in tree.find_all(nodes.Test)}
        filters = {item.name for item in tree.find_all(nodes.Filter)}
        if (
            tests & {"defined", "undefined"}
            or filters & {"default", "d"}
            or list(tree.find_all(nodes.Assign))
        ):
            return True
    return False


def _missing(where: str, name: str, known: Sequence[str]) -> Mistake:
    near = nearest(name, known)
    hint = None if near is None else f"did you mean {near!r}?"
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return Mistake(where, f"the input has no column {name!r}; it has: {shown or 'none'}", hint=hint)
