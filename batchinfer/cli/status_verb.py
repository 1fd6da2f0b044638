"""The command `status`, which reports the state of a run."""

from __future__ import annotations

import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import DEFAULT_JOB, Date, Json, Overrides, folder_or_job
from batchinfer.cli.terminal import paint, say, say_json
from batchinfer.core.errors import Interrupted

if TYPE_CHECKING:
    from batchinfer.job import Job
    from batchinfer.verbs.status import RunStatus

WATCH_EVERY_S = 2.0  # a run writes its progress at this interval
_UP_AND_ERASE = "\x1b[{}A\x1b[J"


def status(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="[TARGET]",
            help="A result folder (`output.path`), also before it is published; or a job file or its folder. `--set` "
            "and `--date` need a job file.",
        ),
    ] = DEFAULT_JOB,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            help="Show the state again every 2 seconds until the run has ended. Ctrl-C ends the watching, not the run.",
        ),
    ] = False,
    prometheus: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Also write the figures into this file, for the textfile collector of Prometheus' node exporter.",
        ),
    ] = None,
    overrides: Overrides = None,
    date: Date = None,
    as_json: Json = False,
) -> int:
    """Say how a job's run stands: progress, rate, time left, memory, errors. Nothing of the job is changed."""
    about = folder_or_job(target, overrides, date)
    try:
        _show(about, watch, prometheus, as_json)
    except Interrupted as stop:
        if not watch or stop.exit_code != 128 + signal.SIGINT:
            raise
    return 0


def _show(about: Path | Job, watch: bool, prometheus: Path | None, as_json: bool) -> None:
    from batchinfer.verbs.status import status_of, write_prometheus

    drawn = 0
    while True:
        found = status_of(about)
        if prometheus is not None:
            write_prometheus(found, prometheus)
        shown, drawn = _draw(found, drawn, as_json)
        if not shown or not watch or not found.running:
            return
        time.sleep(WATCH_EVERY_S)


def _draw(found: RunStatus, drawn: int, as_json: bool) -> tuple[bool, int]:
    if as_json:
        return say_json(found.to_json()), 0
    head, *lines = found.lines(datetime.now(UTC))
    again = _UP_AND_ERASE.format(drawn) if drawn and sys.stdout.isatty() else ""
    text = "\n".join([paint(head, "heading"), *map(paint, lines)])
    return say(again + text), len(lines) + 1
