"""A run's result, for the program that started the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from batchinfer.core.errors import InputMissing
from batchinfer.filesystem.duck import parquet
from batchinfer.filesystem.location import Location
from batchinfer.store.results.published import open_published

if TYPE_CHECKING:
    import pandas
    import polars


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended that published its results. Counts are None where they are not known."""

    results: Path  # the folder of the result
    exit_code: int  # that of `batchinfer run`: 0, or 65 for more error rows than the job allows
    status: str  # `exit_status` of the run table
    message: str | None  # why the exit code is not 0
    report: Path | None  # the run table; None: everything was published already
    rows: int | None
    rows_ok: int | None
    rows_error: int | None
    error_codes: Mapping[str, int]
    computed: int | None  # requests that this run computed
    reused: int | None  # requests that were stored already
    row: Mapping[str, Any] = field(repr=False)  # all columns of the run table

    def files(self) -> list[Path]:
        """The Parquet files in the order of the input, each checked. Raises InputMissing where the result is gone,
        StorageError where it is damaged."""
        found = open_published(Location.at(self.results))
        if found is None:
            raise InputMissing(f"{self.results}: the result is no longer there")
        return list(found.files)

    def to_arrow(self) -> pa.Table:
        """The whole result in memory, in the order of the input."""
        return pa.concat_tables([pq.read_table(file, partitioning=None) for file in self.files()])

    def to_pandas(self) -> pandas.DataFrame:
        """The whole result in memory as pandas has it. Raises ImportError where pandas is not installed."""
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """The whole result in memory as polars has it. Raises ImportError where polars is not installed."""
        import polars

        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame), "of a table"
        return frame

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """The result as a relation, which is read only as far as a query asks; of a new connection by default."""
        return (connection or duckdb.connect()).sql(f"FROM {parquet(self.files())}")
