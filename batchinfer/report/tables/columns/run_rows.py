"""The columns of the run table that count rows, and how right their answers are."""

from __future__ import annotations

from batchinfer.report.column import COUNTS, Column, count, ratio
from batchinfer.report.tables.columns.of_tasks import ANSWERS
from batchinfer.report.tables.columns.shared import LABELLED

ROW_COUNTS: tuple[Column, ...] = (
    count("rows", "rows", "input rows of the job"),
    count("rows_ok", "rows", "rows with an answer, whichever run computed it"),
    count("rows_error", "rows", "error rows"),
    Column("error_codes", COUNTS, "rows", "error rows by `error_code`"),
    *ANSWERS,
    *LABELLED,
    count("unlabelled_rows", "rows", "rows without an expected answer: they are not measured"),
    count(
        "unreadable_labels",
        "rows",
        "rows whose expected answer is no JSON object as the answers are: they are not measured",
    ),
    ratio(
        "mean_probability", "mean of the answers' probabilities, in labelled rows; null: answers have none"
    ),
    ratio("calibration_error", "expected calibration error of these probabilities, in ten bins"),
    ratio(
        "brier_score",
        "mean squared distance of these probabilities from 1 for right answers, 0 for wrong ones",
    ),
    count("distinct_requests", "requests", "distinct requests of the rows without an input error"),
    count("duplicate_rows", "rows", "rows that got the answer of an equal row"),
    count(
        "waves", "plans", "plans that the engines followed while the input was read; null: it was read before"
    ),
    count(
        "again_tokens",
        "tokens",
        "prompt tokens of beginnings that rows of several waves share: at most so many were run again",
    ),
    count("reused_requests", "requests", "requests whose answer was already in the completion store"),
    count(
        "computed_requests",
        "requests",
        "requests that finished in this run, without the prompt of `classify.calibrate`, which answers no row",
        sql="(SELECT count(*) FROM requests WHERE rows > 0)",
    ),
)
