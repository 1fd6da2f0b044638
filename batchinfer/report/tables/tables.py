"""Builds and writes the row of the run table, from facts of the pipeline, totals of the meter and peaks."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchinfer.core.version import __version__
from batchinfer.machine.datasheet import datasheet
from batchinfer.machine.doctor import installed_version
from batchinfer.machine.folders import make_folder
from batchinfer.machine.hardware import Hardware, codes_of
from batchinfer.report.tables.columns.declared import COLUMNS, RUN, SCHEMAS, compute_formulas
from batchinfer.report.tables.folder import prune, table_path
from batchinfer.report.tables.meter import Measured
from batchinfer.report.tables.spool import write_row

_PACKAGES = ("torch", "transformers", "tokenizers", "duckdb", "pyarrow")

RunRow = dict[str, Any]  # a value, or None if unknown, for every name in COLUMNS[RUN]


def versions() -> dict[str, str]:
    """Return the versions, by name, of Python, batchinfer and packages that can change results or speed."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version(), "batchinfer": __version__} | {
        k: v for k, v in found.items() if v is not None
    }


def run_row(
    facts: RunRow, hardware: Hardware | None, measured: Measured | None, meaningless: Sequence[str] = ()
) -> RunRow:
    """Return the row of the run table, including the columns that formulas compute.

    Args:
        facts: Known values by column name: at least run_id, job, output, started_at and finished_at (with
            time zones).
        hardware: The hardware, or None if no engine was started.
        measured: The columns that `Meter.finish` returned, or None if no engine was started.
        meaningless: Columns that stay null, because they do not apply to the job.
    """
    row: RunRow = dict.fromkeys([*SCHEMAS[RUN].names, "waited_s"])
    row |= {"versions": versions()} | facts | (measured or {}) | dict.fromkeys(meaningless)
    if hardware is not None:
        row |= _hardware_columns(hardware, row)
    return compute_formulas(row, COLUMNS[RUN])


def _hardware_columns(hardware: Hardware, row: RunRow) -> RunRow:
    codes = codes_of(row["quantization"] or "none", hardware.device)
    stated, linear = datasheet(hardware.name), codes or row["dtype"] or ""
    # all engines on a CPU share it
    devices = 1 if hardware.device == "cpu" else (row["replicas"] or 1) * (row["ranks"] or 1)
    return {
        "device": hardware.device,
        "hardware": hardware.name,
        "cores": hardware.cores,
        "peak_flops_per_s": _times(hardware.peak_flops.get(linear), devices),
        "peak_bytes_per_s": _times(hardware.bandwidth, devices),
        "peak_source": hardware.source,
        "datasheet_flops_per_s": _times(stated.peak_flops.get(linear), devices) if stated else None,
        "datasheet_bytes_per_s": _times(stated.bandwidth, devices) if stated else None,
    }


def _times(value: float | None, times: int) -> float | None:
    return None if value is None else value * times


def write_run(folder: Path, row: RunRow) -> Path:
    """Write the run table of a run atomically, and return its path. Old tables of earlier runs are deleted.

    Args:
        folder: The folder of report tables.
        row: A value for each column of the run table.

    Raises:
        OSError: The table cannot be written.
        ValueError: The keys of the row are not exactly the columns.
    """
    make_folder(folder)
    path = write_row(table_path(folder, RUN, str(row["run_id"])), SCHEMAS[RUN], row)
    prune(folder)
    return path
