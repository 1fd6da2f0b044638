"""Computes the tables that need all steps of a run: run, requests, phases and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from batchinfer.report.tables.apportion import Apportionment, Share, answered_tokens, ran_tokens
from batchinfer.report.tables.columns.declared import (
    BUCKETS,
    COLUMNS,
    PHASES,
    PROMPT_TOKENS,
    REQUESTS,
    RUN,
    SCHEMAS,
    compute_formulas,
)
from batchinfer.report.tables.device_time import LOSSES, attention_share, device_split
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.percentiles import latency_columns
from batchinfer.report.tables.prefixes import NOWHERE, PrefixNodes
from batchinfer.report.tables.spool import Spool
from batchinfer_kernels.cost import ModelCost, Peaks

Floats = NDArray[np.float64]
Columns = dict[str, Floats]
BATCH_ROWS = 65_536  # requests in memory at a time
_STEPS = (
    "engine", "scheduled_s", "ended_s", "model_s", "prompt_tokens", "decode_tokens", "recomputed_tokens",
    "sampled_tokens", "padded_tokens", "pairs", "kv_tokens", "copied_tokens", "bytes", "roofline_s",
)  # fmt: skip
_REQUESTS = (
    "engine", "prompt_tokens", "completion_tokens", "cached_tokens", "forced_tokens", "unrun_tokens",
    "scored_positions", "scheduled_s", "first_token_s", "finished_s", "place",
)  # fmt: skip
# `gap_s`: from the end of the engine's previous step to the start of this one
_STEP_VIEW = f"""
    *, {PROMPT_TOKENS} AS prompt_tokens, prefill_tokens + decode_tokens AS tokens,
    greatest(interval_s - duration_s, 0) AS gap_s
"""
_WALLS = "SELECT sum(duration_s + gap_s) AS wall_s FROM steps GROUP BY replica"


@dataclass(frozen=True, slots=True)
class Machine:
    """The model and the hardware of a run, from which work and efficiency are computed.

    Attributes:
        cost: The cost of the model's operators, or None if unknown.
        peaks: The peaks of one engine's hardware, or None if unknown.
        engines: Number of replicas.
    """

    cost: ModelCost | None = None
    peaks: Peaks | None = None
    engines: int = 1


@contextmanager
def open_database() -> Iterator[Any]:
    """Open an in-memory DuckDB connection for all report tables of a run."""
    # Opening a connection takes longer than all sums of a short run, so the tables share one
    config: dict[str, str | bool | int | float | list[str]] = {
        "threads": 2,
        "temp_directory": "",
        "python_enable_replacements": False,
    }
    with duckdb.connect(":memory:", config=config) as database:
        yield database


class Details:
    """Computes the report tables that need all steps and requests of a run, such as `phases`."""

    def __init__(self, folder: Path, run_id: str, steps: Path, machine: Machine, database: Any) -> None:
        """Read the steps of a run.

        Args:
            folder: The folder of report tables.
            run_id: The id of the run.
            steps: The file of the report table `steps`.
            machine: The model and the hardware.
            database: A DuckDB connection that only this run uses.
        """
        self._database = database
        self._folder, self._run_id, self._machine = folder, run_id, machine
        _read(database, steps).project(_STEP_VIEW).create_view("steps")
        database.sql(_WALLS).create_view("walls")
        self._columns = _numbers(database.sql(f"SELECT {', '.join(_STEPS)} FROM steps").to_arrow_table())

    def sums(self) -> dict[str, Any]:
        """Return the columns of the run table that follow from steps and requests.

        Call `write_requests` first.
        """
        (row,) = self._rows(RUN, "FROM steps")
        return row | latency_columns(self._database) | self._split()

    def _split(self) -> dict[str, float]:
        # Each part of the device time is a mean over engines
        cost, peaks = self._machine.cost, self._machine.peaks
        if cost is None or peaks is None or not len(self._columns["engine"]):
            return {}
        split = device_split(cost, peaks, self._columns).items()
        names = {part: f"{part}_loss" if part in LOSSES else part for part, _ in split}
        return {f"device_{names[part]}_s": seconds / self._machine.engines for part, seconds in split}

    def write_requests(self, raw: Path, nodes: PrefixNodes) -> None:
        """Write the report table `requests`, with the device time and the FLOPs of each request.

        Args:
            raw: A Parquet file with the samples of requests.
            nodes: The prefix tree of the requests.

        Raises:
            OSError: The table cannot be written.
        """
        engines = {number: self._engine(number) for number in sorted(set(self._columns["engine"].tolist()))}
        for _, requests in self._batches(raw):
            for engine, some in _by_engine(requests, engines):
                engine.add(some)
        for _, requests in self._batches(raw):
            nodes.count(requests, _shares(requests, engines)["model_s"].prompt)
        with Spool(table_path(self._folder, REQUESTS, self._run_id), SCHEMAS[REQUESTS]) as spool:
            for table, requests in self._batches(raw):
                spool.write(self._completed(table, requests, _shares(requests, engines), nodes))
            path = spool.finish()
        _read(self._database, path).create_view("requests")

    def _batches(self, raw: Path) -> Iterator[tuple[pa.Table, Columns]]:
        made = ", ".join(f"{column.sql} AS {column.name}" for column in COLUMNS[REQUESTS] if column.sql)
        for batch in _read(self._database, raw).project(f"*, {made}").to_arrow_reader(BATCH_ROWS):
            table = pa.Table.from_batches([batch])
            yield table, _numbers(table.select(list(_REQUESTS)))

    def _engine(self, number: float) -> Apportionment:
        steps = {name: values[self._columns["engine"] == number] for name, values in self._columns.items()}
        cost, peaks = self._machine.cost, self._machine.peaks
        attention = np.zeros(len(steps["engine"])) if cost is None else attention_share(cost, peaks, steps)
        return Apportionment(steps, attention)

    def _completed(
        self, table: pa.Table, requests: Columns, shares: Mapping[str, Share], nodes: PrefixNodes
    ) -> pa.Table:
        seconds, roofline = shares["model_s"], shares["roofline_s"]
        known: dict[str, object] = {name: table.column(name) for name in table.column_names}
        known |= {
            "prefix": nodes.names(requests["place"]),
            "device_s": nodes.shared(requests, seconds.prompt) + seconds.answer,
            "ran_device_s": seconds.prompt + seconds.answer,
            "answer_device_s": seconds.answer,
            "bytes": shares["bytes"].prompt + shares["bytes"].answer,
            "flops": None if self._machine.cost is None else request_flops(self._machine.cost, requests),
        }
        if not np.isnan(self._columns["roofline_s"]).any():
            known["roofline_s"] = roofline.prompt + roofline.answer
        columns = ((name, known.get(name)) for name in SCHEMAS[REQUESTS].names)
        empty = pa.nulls(table.num_rows)
        return pa.table(
            {name: empty if values is None else values for name, values in columns}, SCHEMAS[REQUESTS]
        )

    def write_phases(self) -> None:
        """Write the report table `phases`, which sums up prefill, decode and mixed steps. Raises OSError."""
        self._write(PHASES, "FROM steps GROUP BY phase ORDER BY phase")

    def write_buckets(self, engine_wall_s: float) -> None:
        """Write the report table `buckets`, which sums up requests by length of prompt.

        Call `write_requests` first. Raises OSError.

        Args:
            engine_wall_s: The value of `engine_wall_s` in the run table, in seconds.
        """
        source = "FROM requests GROUP BY most_prompt_tokens ORDER BY most_prompt_tokens"
        self._write(BUCKETS, source, engine_wall_s)

    def _write(self, table: str, source: str, engine_wall_s: float = 0.0) -> None:
        peaks, engines = self._machine.peaks, self._machine.engines
        known = {
            "run_id": self._run_id,
            "peak_flops_per_s": peaks and (peaks.coded_ops_per_s or peaks.flops_per_s) * engines,
            "peak_bytes_per_s": peaks and peaks.bytes_per_s * engines,
        }
        with Spool(table_path(self._folder, table, self._run_id), SCHEMAS[table]) as spool:
            for row in self._rows(table, source, engine_wall_s):
                spool.append(tuple(compute_formulas(row | known, COLUMNS[table]).values()))
            spool.finish()

    def _rows(self, table: str, source: str, engine_wall_s: float = 0.0) -> list[dict[str, Any]]:
        made = [column for column in COLUMNS[table] if column.sql]
        sql = f"SELECT {', '.join(f'{column.sql} AS {column.name}' for column in made)} {source}"
        peaks = self._machine.peaks
        known = {
            "engines": self._machine.engines,
            "engine_wall_s": engine_wall_s,
            "fastest": peaks and peaks.fastest,
            "bytes_per_s": peaks and peaks.bytes_per_s,
        }
        used = {name: value for name, value in known.items() if f"${name}" in sql}
        found = self._database.execute(sql, used).fetchall()
        return [dict(zip((column.name for column in made), row, strict=True)) for row in found]


def _read(database: Any, path: Path) -> Any:
    return database.read_parquet(escape(str(path)))


def request_flops(cost: ModelCost, requests: Mapping[str, Floats]) -> NDArray[np.int64]:
    """Return the useful FLOPs of each request, counted as in `ModelCost.model_flops`, with shape [requests].

    Args:
        cost: The cost of the model's operators.
        requests: Columns of the table `requests`.
    """
    ran, answered = ran_tokens(requests), answered_tokens(requests)
    end = requests["prompt_tokens"] + answered
    pairs = sum(_pairs(end, window) - _pairs(requests["cached_tokens"], window) for window in cost.windows)
    if not cost.causal:
        pairs = 2 * pairs - end * cost.layers
    rows = requests["completion_tokens"] - requests["forced_tokens"] + requests["scored_positions"]
    head = cost.head_parameters * np.where(ran > 0, rows, 0)
    dense = 2 * (cost.active_parameters * (ran + answered) + head)
    return np.asarray(np.round(dense + np.where(ran > 0, cost.pair_flops * pairs, 0)), np.int64)


def _pairs(tokens: Floats, window: int | None) -> Floats:
    growing = tokens if window is None else np.minimum(tokens, window)
    return growing * (growing + 1) / 2 + (tokens - growing) * growing


def _numbers(table: pa.Table) -> Columns:
    # Null becomes NaN, or NOWHERE in the column `place`
    found = {}
    for name in table.column_names:
        column = table.column(name)
        missing = NOWHERE if name == "place" else np.nan
        found[name] = column.cast(pa.float64()).fill_null(missing).to_numpy()
    return found


def _by_engine(
    requests: Columns, engines: Mapping[float, Apportionment]
) -> Iterator[tuple[Apportionment, Columns]]:
    for number, engine in engines.items():
        some = requests["engine"] == number
        yield engine, {name: values[some] for name, values in requests.items()}


def _shares(requests: Columns, engines: Mapping[float, Apportionment]) -> dict[str, Share]:
    # Requests of an engine without steps get 0
    count = len(requests["engine"])
    found = {name: Share(np.zeros(count), np.zeros(count)) for name in ("model_s", "bytes", "roofline_s")}
    for number, engine in engines.items():
        some = requests["engine"] == number
        for name, share in engine.shares({n: v[some] for n, v in requests.items()}).items():
            found[name].prompt[some], found[name].answer[some] = share
    return found
