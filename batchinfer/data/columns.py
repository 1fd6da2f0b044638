"""Which input columns a job reads, what for, and whether the input has them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from jinja2 import nodes

from batchinfer.data.chat_template import row_environment
from batchinfer.data.prompts import ROW_VARIABLE, Mode, template_columns
from batchinfer.data.rows import Values
from batchinfer.errors import JobFileError, Mistake

if TYPE_CHECKING:
    from batchinfer.job import Job

_MOST_KNOWN = 200  # names remembered for a message


@dataclass(slots=True)
class Columns:
    """`send` are the columns that workers get (None: all), `read` those to decode (None: all, or no choice).

    `overrides` are pairs of a sampling parameter and the column that sets it for a row.
    """

    job: str
    prompt: str | None
    id: str | None
    send: tuple[str, ...] | None
    read: tuple[str, ...] | None
    overrides: tuple[tuple[str, str], ...]
    prompt_key: str = "prompt"  # the job's key that names `prompt`
    known: dict[str, None] = field(default_factory=dict)  # names seen, in order
    rows: int = 0

    def needed(self, row: Values) -> Values:
        """The row cut down to what the workers need."""
        self.rows += 1
        if len(self.known) < _MOST_KNOWN and not row.keys() <= self.known.keys():
            self.known.update(dict.fromkeys(row))
        if self.send is None:
            return row
        return {name: row[name] for name in self.send if name in row}

    def custom_id(self, row: Values) -> str | None:
        """The row's id as text; null stays null."""
        value = row.get(self.id) if self.id is not None else None
        if value is None or isinstance(value, str):
            return value
        return json.dumps(value, ensure_ascii=False, default=str)

    def check_all_seen(self) -> None:
        """Raises JobFileError when rows were read and not one had the id, the prompt or a parameter."""
        full = len(self.known) >= _MOST_KNOWN
        parameters = [("sampling.from_columns", column) for _, column in self.overrides]
        for where, name in (("input.id", self.id), (self.prompt_key, self.prompt), *parameters):
            if self.rows and not full and name is not None and name not in self.known:
                self.refuse([name], where)

    def refuse(self, missing: Iterable[str], where: str) -> None:
        """Raises JobFileError if a column is missing from rows that were read."""
        mistakes = [_missing(where, name, list(self.known)) for name in missing]
        if mistakes and self.rows:
            raise JobFileError(self.job, mistakes)


def choose_columns(job: Job, mode: Mode, schema: pa.Schema | None) -> Columns:
    """What to read for this job. Raises JobFileError for columns that a typed input lacks."""
    prompt = job.prompt
    column = getattr(prompt, mode, None) if mode in ("messages", "text", "token_ids") else None
    identifier = "custom_id" if mode == "openai" else job.input.id
    variables = template_columns(prompt.system) | template_columns(prompt.user) if prompt else set()
    overrides = job.sampling.from_columns
    if mode == "openai" and overrides:
        message = "is not for OpenAI batch files: the body of each request holds its parameters"
        raise JobFileError(str(job.source), [Mistake("sampling.from_columns", message, hint="take it out")])
    whole = mode == "openai" or ROW_VARIABLE in variables
    parameters = {name for _, name in overrides}
    send = None if whole else tuple(sorted({*variables, *parameters, *([column] if column else [])}))
    read = None
    if schema is not None:
        _check_schema(job, schema, mode, column, variables)
        wanted = {*(send or schema.names), *job.output.columns, identifier}
        read = tuple(name for name in schema.names if name in wanted)
    return Columns(str(job.source), column, identifier, send, read, overrides, f"prompt.{mode}")


def _check_schema(job: Job, schema: pa.Schema, mode: Mode, column: str | None, variables: set[str]) -> None:
    names = list(schema.names)
    wanted = [
        ("input.id", job.input.id),
        (f"prompt.{mode}", column),
        *(("output.columns", n) for n in job.output.columns),
        *(("sampling.from_columns", n) for _, n in job.sampling.from_columns),
    ]
    if job.prompt is not None and not _asks_whether_defined(job.prompt.system, job.prompt.user):
        wanted += [("prompt", name) for name in sorted(variables - {ROW_VARIABLE})]
    missing = [
        _missing(where, name, names) for where, name in wanted if name is not None and name not in names
    ]
    if missing:
        raise JobFileError(str(job.source), missing)


def _asks_whether_defined(*sources: str | None) -> bool:
    """A template that asks whether a column is there may do without it."""
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
    near = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]!r}?" if near else None
    shown = ", ".join(known[:20]) + (", …" if len(known) > 20 else "")
    return Mistake(where, f"the input has no column {name!r}; it has: {shown or 'none'}", hint=hint)
