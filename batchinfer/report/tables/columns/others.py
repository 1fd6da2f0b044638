"""The columns of the tables rows, experts, activities, accuracy, confusion and calibration."""

from __future__ import annotations

from batchinfer.report.column import Column, count, ratio, real, seconds, text
from batchinfer.report.tables.columns.formulas import over
from batchinfer.report.tables.columns.shared import LABELLED, RUN_ID

ROW_COLUMNS: tuple[Column, ...] = (
    text("run_id", "the run that published the row"),
    count("row_id", "", "the row, as in the results"),
    text("key", "the work key of the row's answer in hexadecimal, as in `requests`"),
)


EXPERT_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    count("layer", "", "number of the layer, from 0; layers without experts have no rows"),
    count("expert", "", "number of the expert, from 0"),
    count(
        "tokens",
        "tokens",
        "tokens that the expert computed, recomputed ones included, without padding; if `worker_restarts` of `run` "
        "is above 0, since the last start of the engine",
    ),
    real("load", "", "`tokens` ÷ the mean over the layer's experts; 1: an even share"),
)


ACTIVITY_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    text(
        "process", "`command`; `engine` and the number of its process, as in `steps`; `reader` and its number"
    ),
    text("activity", "activity of the process"),
    seconds("from_s", "since the command was started"),
    seconds("until_s", "since the command was started"),
    text("node", "address of the node of the Ray cluster on which an engine ran; null elsewhere"),
    text("machine_class", "class of that node: its GPU, or its CPU and instruction sets; null elsewhere"),
)


ACCURACY_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    text(
        "field", "a field of answers that are objects; null: the answer as a whole, right if all fields are"
    ),
    *LABELLED,
)


CONFUSION_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    text("field", "as in `accuracy`; only fields with at most 50 labels"),
    text("expected", "the label that was expected, as it was first written"),
    text(
        "outcome",
        "`label`: the answer is one of the expected labels; `other`: another text; `error`: the row is an error row",
    ),
    text("answer", "the label in the answer; null for `other` and `error`"),
    count("rows", "rows", "number of rows"),
)


CALIBRATION_COLUMNS: tuple[Column, ...] = (
    RUN_ID,
    ratio("from_probability", "lower bound of the probability of answers, included"),
    ratio("to_probability", "upper bound of the probability, excluded unless it is 1"),
    count("rows", "rows", "labelled rows with such an answer"),
    count("right_rows", "rows", "part of `rows`: the answer is the expected one after both are normalised"),
    ratio("mean_probability", "mean probability of the answers in this tenth"),
    ratio("accuracy", "`right_rows` ÷ `rows`", formula=over("right_rows", "rows")),
)
