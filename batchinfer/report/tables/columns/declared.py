"""Every table of the report: its columns, its schema, and how its rows are completed.

Schemas, rows and sums follow from the columns' declarations, and `docs/report.md` shows the same text, which a test
compares. Null always means "not known", never zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa

from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.report.column import Column
from batchinfer.report.tables.columns.engine import RANK_COLUMNS, REQUEST_COLUMNS, STEP_COLUMNS
from batchinfer.report.tables.columns.others import (
    ACCURACY_COLUMNS,
    ACTIVITY_COLUMNS,
    CALIBRATION_COLUMNS,
    CONFUSION_COLUMNS,
    EXPERT_COLUMNS,
    ROW_COLUMNS,
)
from batchinfer.report.tables.columns.run import RUN_COLUMNS
from batchinfer.report.tables.columns.sums import BUCKET_COLUMNS, PHASE_COLUMNS, PREFIX_COLUMNS

# Since 2, every table has run_id, and there is a table rows; since 3 there are phases, buckets and prefixes;
# since 4 steps and requests say which replica it was; since 5 steps say how they were launched; since 6 there are
# activities; since 7 accuracy, confusion and calibration; since 8 drafts;
# since 9 those of earlier answers and of models; since 10 what proposals of models and heads take; since 11 ranks;
# since 12 guesses of lookahead decoding; since 13 steps say how many were launched at once; since 14 steps and requests
# say how many positions were scored, and runs have a task; lookahead's columns are gone since 14; since 15
# activities say on which node
TABLE_FORMAT = 15
RUN = "run"
STEPS = "steps"
REQUESTS = "requests"
ROWS = "rows"
EXPERTS = "experts"
RANKS = "ranks"
ACTIVITIES = "activities"
PHASES = "phases"
BUCKETS = "buckets"
PREFIXES = "prefixes"
ACCURACY = "accuracy"
CONFUSION = "confusion"
CALIBRATION = "calibration"
PROMPT_TOKENS = "prefill_tokens - recomputed_tokens"  # SQL over `steps`: prompt tokens run, each once


def schema_of(columns: Sequence[Column], table: str) -> pa.Schema:
    """Return the Arrow schema of a table, with the format version in its metadata."""
    metadata = {"batchinfer.table": table, "batchinfer.format": str(TABLE_FORMAT)}
    return pa.schema([pa.field(c.name, c.type) for c in columns], metadata=metadata)


COLUMNS = {
    RUN: RUN_COLUMNS,
    STEPS: STEP_COLUMNS,
    REQUESTS: REQUEST_COLUMNS,
    ROWS: ROW_COLUMNS,
    EXPERTS: EXPERT_COLUMNS,
    RANKS: RANK_COLUMNS,
    ACTIVITIES: ACTIVITY_COLUMNS,
    PHASES: PHASE_COLUMNS,
    BUCKETS: BUCKET_COLUMNS,
    PREFIXES: PREFIX_COLUMNS,
    ACCURACY: ACCURACY_COLUMNS,
    CONFUSION: CONFUSION_COLUMNS,
    CALIBRATION: CALIBRATION_COLUMNS,
}
SCHEMAS = {table: schema_of(columns, table) for table, columns in COLUMNS.items()}


def sampled(columns: Sequence[Column], sample: type[StepSample | RequestSample]) -> tuple[str, ...]:
    """Return the names of those columns that stand in an engine's sample."""
    names = {field.name for field in fields(sample)}
    return tuple(column.name for column in columns if column.name in names and column.name != "key")


def completed(row: dict[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """Return the row with what formulas make of it; it has all other columns, and other values that formulas need."""
    for column in columns:
        if column.formula is not None:
            row[column.name] = column.formula(row)
    return {column.name: row[column.name] for column in columns}


def markdown(columns: Sequence[Column]) -> str:
    """Return the columns as the Markdown table that the documentation shows."""
    head = ["| column | type | unit | meaning |", "|---|---|---|---|"]
    lines = [f"| `{c.name}` | {_type_name(c.type)} | {c.unit} | {c.meaning} |" for c in columns]
    return "\n".join([*head, *lines])


def _type_name(kind: pa.DataType) -> str:
    return "timestamp UTC" if pa.types.is_timestamp(kind) else str(kind).removesuffix(" ('entries')")
