"""The columns of the run table with counts of rows, accuracy and requests."""

from __future__ import annotations

from batchinfer.report.column import COUNTS, Column, count, ratio
from batchinfer.report.tables.columns.of_tasks import ANSWERS
from batchinfer.report.tables.columns.shared import LABELLED

ROW_COUNTS: tuple[Column, ...] = (
    count("rows", "rows", "input rows of the job"),
    count("rows_ok", "rows", "rows with an answer of this run or an earlier one"),
    count("rows_error", "rows", "error rows"),
    Column("error_codes", COUNTS, "rows", "error rows by `error_code`"),
    *ANSWERS,
    *LABELLED,
    count("unlabelled_rows", "rows", "rows without an expected answer: they are not measured"),
    count(
        "unreadable_labels",
        "rows",
        "rows whose expected answer is not a JSON object although the answers are: they are not measured",
    ),
    ratio(
        "mean_probability", "mean of the answers' probabilities, in labelled rows; null: answers have none"
    ),
    ratio("calibration_error", "expected calibration error of the answers' probabilities, in ten bins"),
    ratio(
        "brier_score",
        "mean squared distance of the answers' probabilities from 1 for right answers, 0 for wrong ones",
    ),
    count("distinct_requests", "requests", "distinct requests of the rows without an input error"),
    count("duplicate_rows", "rows", "rows that got the answer of an equal row"),
    count(
        "waves",
        "plans",
        "plans that the engines followed while the input was read; null if the whole input was read first",
    ),
    count(
        "again_tokens",
        "tokens",
        "upper bound of prompt tokens computed again because rows with a common prefix ran in several waves",
    ),
    count("reused_requests", "requests", "requests whose answer was already in the completion store"),
    count(
        "computed_requests",
        "requests",
        "requests that finished in this run, without the content-free prompt of `classify.calibrate`",
        sql="(SELECT count(*) FROM requests WHERE rows > 0)",
    ),
)
