"""The command `schema`, which prints the schema of the job file, or infers one from examples."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from batchinfer.cli.terminal import say_verbatim, tell
from batchinfer.core.text import printable

schema = typer.Typer(context_settings={"help_option_names": ["-h", "--help"]})


@schema.callback(invoke_without_command=True)
def of_job(context: typer.Context) -> None:
    """Print the JSON Schema of the job file, for editors; or, as `schema infer`, one of examples."""
    if context.invoked_subcommand is None:
        from batchinfer.job import job_schema

        say_verbatim(json.dumps(job_schema(), indent=2))


@schema.command()
def infer(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="JSONL, Parquet, CSV or Arrow; a folder or a glob of them.")
    ],
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column of the examples: JSON text, or values with types. By default each row is an example.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Look at the first N rows.")] = 10_000,
) -> None:
    """Print a JSON Schema that the examples are valid under, for output.schema_file."""
    from batchinfer.store.columns.infer_schema import infer_schema

    found = infer_schema(file, column, rows)
    say_verbatim(json.dumps(found.schema, indent=2))
    tell(printable(found.text()))
