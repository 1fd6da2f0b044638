"""The result of a run, for the program that called `batchinfer.run`."""

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
    """The result of a run that published. A count is None if it is unknown.

    Attributes:
        results: The folder of the result.
        exit_code: The exit code of `batchinfer run`: 0, or 65 for more error rows than the job allows.
        status: `exit_status` of the run table.
        message: The reason for an exit code other than 0, or None.
        report: The file of the run table. None if the result was already published.
        rows: Rows of the result.
        rows_ok: Rows with an answer.
        rows_error: Error rows.
        error_codes: Number of error rows by error code.
        computed: Requests that this run computed.
        reused: Requests whose answers were already stored.
        row: All columns of this run's row of the run table.
    """

    results: Path
    exit_code: int
    status: str
    message: str | None
    report: Path | None
    rows: int | None
    rows_ok: int | None
    rows_error: int | None
    error_codes: Mapping[str, int]
    computed: int | None
    reused: int | None
    row: Mapping[str, Any] = field(repr=False)

    def files(self) -> list[Path]:
        """Check the Parquet files of the result, and return them in the order of the input.

        Raises:
            InputMissing: The result was removed.
            StorageError: A file is damaged.
        """
        found = open_published(Location.at(self.results))
        if found is None:
            raise InputMissing(f"{self.results}: the result is no longer there")
        return list(found.files)

    def to_arrow(self) -> pa.Table:
        """Return the whole result as a pyarrow table, in the order of the input."""
        return pa.concat_tables([pq.read_table(file, partitioning=None) for file in self.files()])

    def to_pandas(self) -> pandas.DataFrame:
        """Return the whole result as a pandas data frame.

        Raises:
            ImportError: pandas is not installed.
        """
        return self.to_arrow().to_pandas()

    def to_polars(self) -> polars.DataFrame:
        """Return the whole result as a polars data frame.

        Raises:
            ImportError: polars is not installed.
        """
        import polars

        frame = polars.from_arrow(self.to_arrow())
        assert isinstance(frame, polars.DataFrame), "of a table"
        return frame

    def to_duckdb(self, connection: duckdb.DuckDBPyConnection | None = None) -> duckdb.DuckDBPyRelation:
        """Return the result as a DuckDB relation. The files are read when the relation is used.

        Args:
            connection: The connection of the relation. None: a new connection.
        """
        return (connection or duckdb.connect()).sql(f"FROM {parquet(self.files())}")
