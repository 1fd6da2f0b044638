"""The verbs about a result: query, verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer import verbs
from batchinfer.errors import StorageError


def query(
    results: Annotated[Path, typer.Argument(metavar="RESULT", help="A result folder.")],
    sql: Annotated[
        str, typer.Argument(metavar="SQL", help="DuckDB SQL; the table is called results.")
    ] = "FROM results LIMIT 20",
    partial: Annotated[
        bool, typer.Option("--partial", help="Read what an unfinished run has committed so far.")
    ] = False,
) -> None:
    """Query a result folder with DuckDB."""
    typer.echo(verbs.query_results(results, sql, partial))


def verify(results: Annotated[Path, typer.Argument(metavar="RESULT", help="A result folder.")]) -> int:
    """Read a result and its stored completions whole, and check every checksum."""
    problems = verbs.verify_results(results)
    for problem in problems:
        typer.echo(f"{problem.path}: {problem.message}", err=True)
    typer.echo(f"{len(problems)} problem{'' if len(problems) == 1 else 's'} found in {results}")
    return StorageError.exit_code if problems else 0
