"""The command `diff`, which compares two results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from batchinfer.cli.options import Json
from batchinfer.cli.terminal import paint, say_json, say_verbatim
from batchinfer.core.wording import count, counted

if TYPE_CHECKING:
    from batchinfer.store.accuracy.compare import AccuracyDiff, RightRows
    from batchinfer.store.results.diff import Difference, DifferingRows, ResultDiff

DIFFERENT = 65  # exit code if results differ and --fail-if-different is given


def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A result folder.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The result folder to compare with A.")],
    by: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="Match rows by this column, whose values must be unique. By default `custom_id` if it is unique in "
            "both results, else `row_id`.",
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
    from batchinfer.store.results.diff import DiffOptions
    from batchinfer.verbs.diff import compare_results

    found = compare_results(a, b, DiffOptions(by, examples, show))
    code = DIFFERENT if fail and found.different else 0
    if as_json:
        say_json({"exit_code": code, "different": found.different, **asdict(found)})
    else:
        head, *lines = _lines(found)
        say_verbatim("\n".join([paint(head, "heading"), *map(paint, lines)]))
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
    if found.accuracy is not None:
        yield from _accuracy_lines(found.accuracy)


def _accuracy_lines(found: AccuracyDiff) -> Iterator[str]:
    if found.other_labels:
        yield f"  expected answers differ in {counted(found.other_labels, 'row')}, which are not measured here"
    if not found.rows:
        yield "  no row has an expected answer in both"
        return
    yield from _right_lines(found.exact, found.rows, "right")
    if found.normalised != found.exact:
        yield from _right_lines(found.normalised, found.rows, "right once normalised")


def _right_lines(right: RightRows, rows: int, what: str) -> Iterator[str]:
    a, b = ((right.both + only) / rows for only in (right.only_a, right.only_b))
    yield f"  {what}: A {a:.1%}, B {b:.1%} of {counted(rows, 'row')} with an expected answer"
    yield f"    only A in {counted(right.only_a, 'row')}, only B in {count(right.only_b)}: {_verdict(right)}"


def _verdict(right: RightRows) -> str:
    from batchinfer.store.accuracy.mcnemar import SIGNIFICANT

    test = "McNemar's test, p < 0.001" if right.p < 0.001 else f"McNemar's test, p = {right.p:.3f}"
    if right.p >= SIGNIFICANT:
        return f"the difference may be chance ({test})" if right.only_a + right.only_b else "no difference"
    better, other = "AB" if right.only_a > right.only_b else "BA"
    return f"{better} is right more often than {other}, by more than chance ({test})"


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
