"""The command `show`, which prints rows of a result as cards."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from batchinfer.cli.options import Json
from batchinfer.cli.result_verbs import Partial, Result
from batchinfer.cli.terminal import columns_of_terminal, paint, say_lines, say_verbatim


def show(
    results: Result,
    rows: Annotated[
        int, typer.Option("--rows", "-n", min=1, metavar="N", help="Number of rows to show.")
    ] = 10,
    errors: Annotated[bool, typer.Option("--errors", help="Show only error rows.")] = False,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Show only rows that meet this condition on the columns of the result, such as `label = 'bug'`.",
        ),
    ] = None,
    partial: Partial = False,
    as_json: Json = False,
) -> None:
    """Show rows of a result as cards: the answer, its error, and the columns of the input that it carries."""
    from batchinfer.verbs.show import ShownRows

    wanted = ShownRows(results, rows, errors, where, partial)
    if as_json:
        say_lines(wanted.json_lines())
        return
    for head, body in wanted.cards(columns_of_terminal(sys.stdout)):
        text = paint(head, "heading" if body else "quiet") + (f"\n{body}" if body else "")
        if not say_verbatim(text):
            return
