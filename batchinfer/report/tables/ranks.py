"""Writes the report table of ranks, and sums ranks up for the run table."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from batchinfer.core.samples import RankUse
from batchinfer.report.tables.columns.declared import COLUMNS, RANKS, SCHEMAS
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.spool import Spool


class EngineRank(NamedTuple):
    """A rank of one of a run's engines, with its resource use.

    Attributes:
        engine: The number of the engine's process in the run.
        replica: The number of the replica.
        use: The memory, file reads and waiting times of the rank.
    """

    engine: int
    replica: int
    use: RankUse


def write_ranks(folder: Path, run_id: str, ranks: Sequence[EngineRank]) -> Path:
    """Write the report table `ranks` of a run atomically, and return its path.

    Raises:
        OSError: The table cannot be written.
    """
    values = attrgetter(*(column.name for column in COLUMNS[RANKS][3:]))
    with Spool(table_path(folder, RANKS, run_id), SCHEMAS[RANKS]) as spool:
        for engine, replica, use in ranks:
            spool.append((run_id, engine, replica, *values(use)))
        return spool.finish()


def rank_columns(ranks: Sequence[EngineRank]) -> dict[str, Any]:
    """Return the columns of the run table about ranks, or an empty dict without ranks."""
    if not ranks:
        return {}
    uses = [one.use for one in ranks]
    waits = [use.stage_wait_s for use in uses if use.stage_wait_s is not None]
    return {
        "stage_wait_s": fmean(waits) if waits else None,
        "rank_peak_rss_bytes": max(use.peak_rss_bytes for use in uses),
        "rank_read_bytes": max(use.read_bytes for use in uses),
    }
