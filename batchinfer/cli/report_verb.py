"""The command `report`, which writes a page about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.cli.options import Json
from batchinfer.cli.terminal import say, say_json
from batchinfer.core.text import printable
from batchinfer.core.wording import size


def report(
    results: Annotated[
        Path,
        typer.Argument(
            metavar="RESULT",
            help="A result folder, also after a run that failed to publish, or a report folder.",
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File of the page; by default `report.html` in the report folder. An earlier page is replaced, any "
            "other file is kept (exit code 73).",
        ),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            "--run",
            metavar="RUN_ID",
            help="Run id, as `batchinfer history` lists it. By default the newest run of this result, or of all runs "
            "for a report folder.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a page about a run: one HTML file with charts and tables, which needs no network."""
    from batchinfer.verbs.report_page import write_page

    written = write_page(results, output, run)
    if as_json:
        say_json({"exit_code": 0, **written.to_json()})
    else:
        say(printable(f"wrote {written.path} ({size(written.bytes)}) about run {written.run_id}"))
