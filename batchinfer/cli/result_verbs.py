"""Commands for results: query, verify and clean."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import DEFAULT_JOB, Date, Json, Overrides, load
from batchinfer.cli.terminal import paint, say, say_json, say_lines, tell
from batchinfer.core.errors import StorageError, UsageError
from batchinfer.core.text import printable
from batchinfer.report.tables.queried import QUERIED
from batchinfer.verbs.answer import FORMATS, JSON_FORMATS, check_escapes, check_format

if TYPE_CHECKING:
    from batchinfer.store.results.published import Problem
    from batchinfer.verbs.query import Query
    from batchinfer.verbs.verify import Verification


Result = Annotated[
    Path,
    typer.Argument(
        metavar="RESULT",
        help="A result folder (`results/tickets`), or a report folder (`results/tickets-report`).",
    ),
]
Sql = Annotated[
    str | None,
    typer.Argument(
        metavar="SQL",
        help=f"One query in DuckDB's SQL. Its tables: {', '.join(QUERIED)}. Without SQL, queries are typed at a "
        "[prompt](#prompt-and-pipe), or read from a pipe.",
        show_default=False,
    ),
]
Partial = Annotated[
    bool,
    typer.Option(
        "--partial",
        help="Read the rows that an unfinished run has committed. Until it has read its input, there are none (exit "
        "code 66).",
    ),
]
Form = Annotated[
    str,
    typer.Option(
        "--format", "-f", metavar="FORMAT", help=f"[Format of the answer](#formats): {', '.join(FORMATS)}."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write the answer to a new file instead of stdout; `auto` then chooses the format by the suffix. An "
        "existing file is kept (exit code 73).",
    ),
]
EscapeFormulas = Annotated[
    bool,
    typer.Option(
        "--escape-formulas",
        help="Write CSV that is [safe to open in a spreadsheet program](#csv-and-spreadsheets). Other formats are "
        "refused.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The same as `--format json`: one object per row.")]


def query(
    results: Result,
    sql: Sql = None,
    partial: Partial = False,
    form: Form = "auto",
    output: Output = None,
    escape_formulas: EscapeFormulas = False,
    as_json: AsJson = False,
) -> None:
    """Query a result and its report with DuckDB's SQL. Nothing is changed."""
    from batchinfer.verbs.query import Query

    if as_json and form not in ("auto", *JSON_FORMATS):
        raise UsageError(
            f"--json means --format json, but --format {form} is given as well; leave one of the two out"
        )
    form = check_escapes("json" if as_json else form, escape_formulas, output)
    question = Query(results, sql, partial, escape_formulas)
    if output is not None:
        question.save(form, output)
        tell(printable(f"wrote {output}"))
    else:
        _answer(question, form)


def _answer(question: Query, form: str) -> None:
    from batchinfer.cli.query_prompt import converse
    from batchinfer.verbs.query import open_result

    check_format(form, None)
    if question.sql is None:
        with open_result(question.folder, question.partial) as result:
            converse(result, form, question.escape_formulas)
        return
    terminal = sys.stdout.isatty()
    lines = question.lines(form, shutil.get_terminal_size().columns if terminal else None)
    say_lines(map(printable, lines) if terminal else lines)


def verify(
    results: Annotated[Path, typer.Argument(metavar="RESULT", help="A result folder.")],
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="If anything is damaged, run the job again. The run drops damaged stored answers, computes the "
            "missing ones, and publishes the result again. Then `verify` checks again.",
        ),
    ] = False,
    as_json: Json = False,
) -> int:
    """Read a result and its stored answers completely, and check every checksum."""
    from batchinfer.pipeline.repair import next_step, repair_result
    from batchinfer.report.progress import Progress
    from batchinfer.verbs.verify import verify_results

    found = verify_results(results)
    if repair and found.problems:
        if not as_json:
            _tell_problems(found.problems)
        with Progress(sys.stderr, quiet=as_json) as progress:
            repair_result(results, progress, _silent if as_json else progress.note)
        found = verify_results(results)
    code = StorageError.exit_code if found.problems else 0
    if as_json:
        _say_verified(results, found, code)
        return code
    _tell_problems(found.problems)
    if found.unchecked is not None:
        tell(printable(found.unchecked))
    if found.problems:
        tell(printable(next_step(results)))
    where = f"{results}" if found.store is None else f"{results} and {found.store}"
    count = len(found.problems)
    say(paint(f"{count} problem{'' if count == 1 else 's'} found in {where}", "bad" if count else "good"))
    return code


def _silent(_: str) -> None:
    """Drop a note instead of printing it, for --json."""


def _tell_problems(problems: Sequence[Problem]) -> None:
    for problem in problems:
        tell(printable(f"{problem.file}: {problem.message}"))


def _say_verified(results: Path, found: Verification, code: int) -> None:
    from batchinfer.pipeline.repair import next_step

    problems = [{"path": str(problem.file), "message": problem.message} for problem in found.problems]
    store = None if found.store is None else str(found.store)
    next_ = {"next": next_step(results)} if problems else {}
    say_json({"exit_code": code, "path": str(results), "problems": problems, "store": store, **next_})


def clean(
    target: Annotated[
        Path,
        typer.Argument(
            metavar="[TARGET]",
            help="A job file or its folder, or a result folder. For a result folder, `cache.keep` of the job's "
            "last run applies. `--set` and `--date` need a job file.",
        ),
    ] = DEFAULT_JOB,
    overrides: Overrides = None,
    date: Date = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove stored answers that no result has used lately, and what old runs left in the state folder."""
    from batchinfer.job.file import job_file_in
    from batchinfer.pipeline.clean import clean_job, clean_result

    target = job_file_in(target)
    if target.is_dir():
        given = [name for name, value in (("--set", overrides), ("--date", date)) if value]
        if given:
            raise UsageError(
                f"{' and '.join(given)}: only with a job file; {target} is a folder, for which the `cache.keep` of "
                f"the job's last run applies. Name the job file: batchinfer clean JOB.YAML {given[0]} ..."
            )
        done = clean_result(target, dry_run)
    else:
        job = load(target, overrides, date)
        with job.located():
            done = clean_job(job, dry_run)
    if as_json:
        say_json(done.to_json())
    else:
        say(printable(done.text()))
