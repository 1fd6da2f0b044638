"""The command `history`, which shows all runs of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from batchinfer.cli.options import Json, Overrides, folder_or_job
from batchinfer.cli.terminal import paint, say, say_json, tell_error
from batchinfer.core.wording import percent


def history(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="[TARGET]",
            help="A result folder, a report folder, a job file, or the folder of a job file. `--set` needs a job file.",
        ),
    ] = Path("job.yaml"),
    limit: Annotated[
        int, typer.Option(min=1, metavar="N", help="Show the newest N runs. The comparison uses all runs.")
    ] = 20,
    slower: Annotated[
        str | None,
        typer.Option(
            "--fail-if-slower",
            metavar="PERCENT",
            help="End with exit code 65 if the newest run is slower than the median of earlier runs by more than this, "
            "such as `10%`. With too few runs to compare, the command does not fail.",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> int:
    """Show all runs of a job, and compare the newest run with earlier runs."""
    from batchinfer.verbs.history import SLOWER, history_of, share_of

    share = None if slower is None else share_of(slower)
    found = history_of(folder_or_job(target, overrides))
    comparison = found.comparison
    failed = share is not None and comparison.slower_than(share)
    code = SLOWER if failed else 0
    if as_json:
        say_json({"exit_code": code, **found.to_json(limit)})
    else:
        head, *lines = found.lines(limit)
        say("\n".join([paint(head, "heading"), *map(paint, lines)]))
    if failed and comparison.change is not None:
        tell_error(
            f"{comparison.run_id} is {percent(-comparison.change)} slower than the runs before it; "
            f"--fail-if-slower allows {slower}"
        )
    return code
