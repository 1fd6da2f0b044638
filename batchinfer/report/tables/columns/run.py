"""The columns of the run table."""

from __future__ import annotations

from batchinfer.report.column import Column
from batchinfer.report.tables.columns.run_efficiency import EFFICIENCY
from batchinfer.report.tables.columns.run_forecast import FORECAST
from batchinfer.report.tables.columns.run_rows import ROW_COUNTS
from batchinfer.report.tables.columns.run_setting import SETTING
from batchinfer.report.tables.columns.run_time import TIMES
from batchinfer.report.tables.columns.run_work import WORK

RUN_COLUMNS: tuple[Column, ...] = (*SETTING, *ROW_COUNTS, *WORK, *TIMES, *EFFICIENCY, *FORECAST)
