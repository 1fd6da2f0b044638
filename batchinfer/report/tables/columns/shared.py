"""Columns that are part of several tables."""

from __future__ import annotations

from collections.abc import Iterator

from batchinfer.report.column import Column, count, ratio, seconds, text, total
from batchinfer.report.tables.columns.formulas import over

LAUNCHED = {
    "full_graph": "replayed as one graph",
    "piecewise_graph": "replayed as graphs of their pieces, with attention launched between the pieces",
    "eager": "launched one operator at a time",
}
_DRAFTED = {
    "prompt": "the row's own prompt and answer",
    "answers": "other answers of the job",
    "earlier": "the row's answer in the job's last result",
    "model": "the model of `drafts.model`",
    "heads": "the heads of `drafts.heads`",
}


def drafts(of_run: bool) -> Iterator[Column]:
    """Yield the report columns about draft tokens.

    Args:
        of_run: True for the run table, whose columns are sums over steps. False for the table of steps.
    """

    def summed(column: str) -> str:
        return total(column) if of_run else ""

    yield count("drafted_tokens", "tokens", "draft tokens that steps verified", sql=summed("drafted_tokens"))
    yield count(
        "accepted_tokens",
        "tokens",
        "accepted draft tokens: equal to the sampled token; part of `sampled_tokens`",
        sql=summed("accepted_tokens"),
    )
    for source, where in _DRAFTED.items():
        for what in ("drafted", "accepted"):
            name = f"{source}_{what}"
            yield count(name, "tokens", f"part of `{what}_tokens`: from {where}", sql=summed(name))
    yield seconds(
        "proposing_s",
        "part of `duration_s`: proposals of a draft model with `drafts.runs: beside`, or of heads"
        if not of_run
        else "part of the engines' time: proposals of a draft model with `drafts.runs: beside`, or of heads",
        sql=mean_of_engines("proposing_s") if of_run else "",
    )
    yield seconds(
        "drafts_saved_s",
        "time that drafts saved: the estimated time of the same tokens without drafts, less their actual time"
        + ("; at most the time of all steps; null if it is unknown for most draft tokens" if of_run else ""),
        sql=_SAVED_S if of_run else "",
    )


# `drafts_saved_s` is null in the first steps of a run, which have no median times yet
_SAVED_S = """CASE WHEN 2 * coalesce(sum(drafted_tokens) FILTER (drafts_saved_s IS NULL), 0)
    <= coalesce(sum(drafted_tokens), 0)
THEN least(coalesce(sum(drafts_saved_s), 0), coalesce(sum(duration_s), 0)) / $engines END"""


def mean_of_engines(column: str) -> str:
    """Return SQL for a column's sum over all steps, divided by the number of engines (`$engines`)."""
    return f"{total(column)} / $engines"


RUN_ID = text("run_id", "the run, as in `run`")
WHICH_ENGINE: tuple[Column, ...] = (
    count("engine", "", "number of the engine's process in this run, from 0; a restart gets the next number"),
    count("replica", "", "number of the replica, from 0; an engine that replaces a dead one keeps it"),
)

LABELLED: tuple[Column, ...] = (
    count("labelled_rows", "rows", "rows with an expected answer (`input.expected`)"),
    count("labelled_errors", "rows", "part of `labelled_rows`: error rows, which count as wrong"),
    count("exact_rows", "rows", "part of `labelled_rows`: the answer is the expected one"),
    count(
        "normalised_rows",
        "rows",
        "`exact_rows`, and rows whose answer is the expected one after both are normalised",
    ),
    ratio("accuracy", "`exact_rows` ÷ `labelled_rows`", formula=over("exact_rows", "labelled_rows")),
    ratio(
        "normalised_accuracy",
        "`normalised_rows` ÷ `labelled_rows`",
        formula=over("normalised_rows", "labelled_rows"),
    ),
)
