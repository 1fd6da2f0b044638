"""The verb that compares two results: diff."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import Json
from batchinfer.cli.terminal import painted, say_json, say_verbatim
from batchinfer.core.wording import count, counted

if TYPE_CHECKING:
    from batchinfer.data.results.diff import Difference, DifferingRows, ResultDiff

DIFFERENT = 65  # the exit code: the results do not meet what the command line asks for


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The result folder to compare it with.")],
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Match rows by this column. Default: custom_id if it is unique in both results, else row_id.",
        ),
    ] = None,
    examples: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Show the ids of at most N rows for each kind of difference."),
    ] = 5,
    show: Annotated[
        bool,
        typer.Option("--show", help="Also show the texts and values that these rows have in both results."),
    ] = False,
    fail: Annotated[
        bool, typer.Option("--fail-if-different", help="End with exit code 65 if anything differs.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Compare two results of the same rows: answers, errors and columns that differ. Nothing is changed."""
    from batchinfer.data.results.diff import DiffOptions
    from batchinfer.verbs.diff import compare_results

    found = compare_results(a, b, DiffOptions(by, examples, show))
    code = DIFFERENT if fail and found.different else 0
    if as_json:
        say_json({"exit_code": code, "different": found.different, **asdict(found)})
    else:
        head, *lines = _lines(found)
        say_verbatim("\n".join([painted(head, "heading"), *map(painted, lines)]))
    return code


def _lines(found: ResultDiff) -> Iterator[str]:
    yield (
        f"A has {counted(found.rows_a, 'row')}, B {count(found.rows_b)}; {count(found.matched)} matched by "
        f"{found.matched_by}"
    )
    if found.note is not None:
        yield f"  not by custom_id: {found.note}"
    for side, names in (("A", found.columns_only_a), ("B", found.columns_only_b)):
        if names:
            yield f"  columns only in {side}: {', '.join(names)}"
    for group in found.groups:
        yield from _group_lines(group, found.matched_by)
    if not found.different:
        yield "  no difference"


_WORDS = {
    "only in A": "only in A",
    "only in B": "only in B",
    "answer": "answers changed",
    "error came": "new errors",
    "error went": "errors gone",
    "error changed": "different errors",
    "column": "column differs",
}


def _group_lines(group: DifferingRows, matched_by: str) -> Iterator[str]:
    what = _WORDS[group.kind] + ("" if group.name is None else f": {group.name}")
    shown = [example for example in group.examples if example.a is not None or example.b is not None]
    more = ", …" if group.rows > len(group.examples) else ""
    ids = (
        ""
        if shown or not group.examples
        else f"  ({matched_by} {', '.join(e.id for e in group.examples)}{more})"
    )
    yield f"  {what}: {counted(group.rows, 'row')}{ids}"
    for example in shown:
        yield from _sides(example, matched_by)


def _sides(example: Difference, matched_by: str) -> Iterator[str]:
    yield f"    {matched_by} {example.id}"
    for side, text in (("A", example.a), ("B", example.b)):
        first, *rest = ("–" if text is None else text).split("\n")
        yield f"      {side}: {first}"
        yield from (f"         {line}" for line in rest)
