"""The tables of the report, with their columns and schemas.

Schemas, rows and sums follow from the declarations of columns, and so do the tables of docs/report.md. Null
always means unknown, never zero.
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

# New in each format: 2: run_id in all tables, table rows; 3: tables phases, buckets and prefixes; 4: replica of steps
# and requests; 5: launch of steps; 6: table activities; 7: tables accuracy, confusion and calibration; 8: drafts;
# 9: drafts of earlier answers and models; 10: proposing_s; 11: table ranks; 12: lookahead; 13: launched_steps;
# 14: scored_positions and task, lookahead removed; 15: node of activities; 16: quality_kl
TABLE_FORMAT = 16
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
# SQL over `steps`: computed prompt tokens, each counted once
PROMPT_TOKENS = "prefill_tokens - recomputed_tokens"


def schema_of(columns: Sequence[Column], table: str) -> pa.Schema:
    """Return the Arrow schema of a report table, with the format version in its metadata."""
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


def sampled_columns(columns: Sequence[Column], sample: type[StepSample | RequestSample]) -> tuple[str, ...]:
    """Return the names of a report table's columns that are fields of an engine's samples, without `key`.

    Args:
        columns: The columns of the table.
        sample: The class of samples.
    """
    names = {field.name for field in fields(sample)}
    return tuple(column.name for column in columns if column.name in names and column.name != "key")


def compute_formulas(row: dict[str, Any], columns: Sequence[Column]) -> dict[str, Any]:
    """Return a row of a report table with the columns that formulas compute.

    Args:
        row: All other columns, and further values that formulas need.
        columns: The columns of the table.
    """
    for column in columns:
        if column.formula is not None:
            row[column.name] = column.formula(row)
    return {column.name: row[column.name] for column in columns}
