"""The command line. Only this package prints and chooses exit codes."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Any

import typer

from batchinfer.cli.bench_verb import bench
from batchinfer.cli.diff_verb import diff
from batchinfer.cli.doctor_verb import doctor
from batchinfer.cli.endings import explain
from batchinfer.cli.history_verb import history
from batchinfer.cli.job_verbs import init, plan, preview, run, validate
from batchinfer.cli.pull_verb import pull
from batchinfer.cli.quantize_verb import quantize
from batchinfer.cli.report_verb import report
from batchinfer.cli.result_verbs import clean, query, verify
from batchinfer.cli.schema_verb import schema
from batchinfer.cli.show_verb import show
from batchinfer.cli.status_verb import status
from batchinfer.cli.terminal import say
from batchinfer.core.errors import Interrupted, UsageError
from batchinfer.core.text import without_markup
from batchinfer.core.version import __version__
from batchinfer.pipeline.workers.interrupts import Interrupts

app = typer.Typer(
    name="batchinfer",
    help="Offline batch inference: a table of prompts in, a Parquet table of answers out.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help
for _verb in (
    run,
    plan,
    validate,
    preview,
    init,
    pull,
    quantize,
    doctor,
    status,
    show,
    query,
    report,
    history,
    diff,
    verify,
    clean,
    bench,
):
    app.command()(_verb)
app.add_typer(schema, name="schema")


def main() -> None:
    """Run the command of the command line, and exit with its exit code."""
    logging.basicConfig(level=logging.WARNING, format="batchinfer: %(message)s")
    sys.exit(_guarded(sys.argv[1:]))


def _guarded(arguments: list[str]) -> int:
    as_json = "--json" in arguments
    # For all commands. `run` adds its own handler, which knows what may be stopped when.
    interrupts = Interrupts("interrupted")
    try:
        with interrupts.installed(), interrupts.reraised():
            result = _command()(arguments, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except Exception as error:  # noqa: BLE001 - the last place to turn it into an exit code
        return explain(error, as_json)
    except KeyboardInterrupt:
        return explain(Interrupted(signal.SIGINT, "interrupted"), as_json)


@cache
def _command() -> Callable[..., object]:
    # Cached, since building it takes longer than many commands. The help of options has links, for docs/cli.md; a
    # terminal shows only their text.
    command = typer.main.get_command(app)
    _without_links(command)
    return command


def _without_links(command: Any) -> None:
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            parameter.help = without_markup(text)
    for inner in getattr(command, "commands", {}).values():
        _without_links(inner)


def _no_colours(wanted: bool) -> None:
    if wanted:
        os.environ["NO_COLOR"] = "1"  # also read by the libraries that print help


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    no_color: Annotated[
        bool,
        typer.Option(
            "--no-color",
            help="Use no colours, even on a terminal (the same as NO_COLOR=1).",
            callback=_no_colours,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Offline batch inference."""
    if version:
        say(f"batchinfer {__version__}")
        raise typer.Exit
    if context.invoked_subcommand != "pull":
        # No library may download anything, in this process or in its children
        os.environ["HF_HUB_OFFLINE"] = "1"
    if context.invoked_subcommand is None:
        context.get_help()  # typer prints it itself
        raise typer.Exit(UsageError.exit_code)


if os.name != "posix":  # flock, spawn and signals are needed
    raise SystemExit("batchinfer runs on Linux and macOS")
