"""What is known of a run's requests, phases and buckets only once all of its steps are known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from batchinfer.report.tables.apportion import Apportionment, Share, answered_tokens, ran_tokens
from batchinfer.report.tables.columns import (
    BUCKET_SCHEMA,
    BUCKETS,
    PHASE_SCHEMA,
    PHASES,
    REQUEST_SCHEMA,
    REQUESTS,
)
from batchinfer.report.tables.device_time import attention_share, device_split
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.prefixes import NONE, PrefixNodes
from batchinfer.report.tables.spool import Spool
from batchinfer_kernels.cost import ModelCost, Peaks

Floats = NDArray[np.float64]
Columns = dict[str, Floats]
BATCH_ROWS = 65_536  # requests held at a time
_STEPS = (
    "engine", "scheduled_s", "ended_s", "model_s", "prefill_tokens", "decode_tokens", "recomputed_tokens",
    "sampled_tokens", "padded_tokens", "pairs", "kv_tokens", "copied_tokens", "bytes", "roofline_s",
)  # fmt: skip
_REQUESTS = (
    "engine", "prompt_tokens", "completion_tokens", "cached_tokens", "forced_tokens", "unrun_tokens",
    "scheduled_s", "first_token_s", "finished_s", "prefix",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """What ran: None where it is not known."""

    cost: ModelCost | None = None
    peaks: Peaks | None = None  # of one engine
    engines: int = 1  # that shared the work


class Details:
    """Of one run, from its table of steps; `database`: a connection to DuckDB."""

    def __init__(self, folder: Path, run_id: str, steps: Path, machine: Machine, database: Any) -> None:
        self._database = database
        self._folder, self._run_id, self._steps, self._machine = folder, run_id, steps, machine
        self._columns = _numbers(pq.read_table(steps, columns=list(_STEPS)))

    def split(self) -> Mapping[str, float]:
        """The parts of the device's time, the mean of all engines; none where the model or the peaks are not known, or
        nothing ran."""
        cost, peaks = self._machine.cost, self._machine.peaks
        if cost is None or peaks is None or not len(self._columns["engine"]):
            return {}
        split = device_split(cost, peaks, self._columns)
        return {part: seconds / self._machine.engines for part, seconds in split.items()}

    def write_requests(self, raw: Path, nodes: PrefixNodes) -> Path:
        """The table of requests, from the file in which they stand without what steps say of them. Raises OSError."""
        engines = {number: self._engine(number) for number in np.unique(self._columns["engine"])}
        for _, requests in _batches(raw):
            for engine, some in _by_engine(requests, engines):
                engine.add(some)
        for _, requests in _batches(raw):
            nodes.count(requests, _shares(requests, engines)["model_s"].prompt)
        with Spool(table_path(self._folder, REQUESTS, self._run_id), REQUEST_SCHEMA) as spool:
            for table, requests in _batches(raw):
                spool.write(self._completed(table, requests, _shares(requests, engines), nodes))
            return spool.finish()

    def _engine(self, number: float) -> Apportionment:
        steps = {name: values[self._columns["engine"] == number] for name, values in self._columns.items()}
        cost, peaks = self._machine.cost, self._machine.peaks
        attention = np.zeros(len(steps["engine"])) if cost is None else attention_share(cost, peaks, steps)
        return Apportionment(steps, attention)

    def _completed(
        self, table: pa.Table, requests: Columns, shares: Mapping[str, Share], nodes: PrefixNodes
    ) -> pa.Table:
        seconds, roofline = shares["model_s"], shares["roofline_s"]
        known: dict[str, Floats | NDArray[np.int64]] = {
            "device_s": nodes.shared(requests, seconds.prompt) + seconds.answer,
            "ran_device_s": seconds.prompt + seconds.answer,
            "answer_device_s": seconds.answer,
            "bytes": shares["bytes"].prompt + shares["bytes"].answer,
        }
        if self._machine.cost is not None:
            known["flops"] = request_flops(self._machine.cost, requests)
        if not np.isnan(self._columns["roofline_s"]).any():
            known["roofline_s"] = roofline.prompt + roofline.answer
        for name, values in known.items():
            at = table.schema.get_field_index(name)
            table = table.set_column(at, table.schema.field(at), pa.array(values))
        return table

    def write_phases(self) -> Path:
        """The table of phases. Raises OSError."""
        engines = self._machine.engines
        return self._write(PHASES, PHASE_SCHEMA, _PHASES, [engines, engines, engines, str(self._steps)])

    def write_buckets(self, requests: Path, engine_wall_s: float) -> Path:
        """The table of buckets. Raises OSError."""
        return self._write(
            BUCKETS, BUCKET_SCHEMA, _BUCKETS, [str(requests), engine_wall_s, self._machine.engines]
        )

    def _write(self, name: str, schema: pa.Schema, sql: str, given: list[str | float]) -> Path:
        peaks, engines = self._machine.peaks, self._machine.engines
        flops_per_s = None if peaks is None else (peaks.coded_ops_per_s or peaks.flops_per_s) * engines
        bytes_per_s = None if peaks is None else peaks.bytes_per_s * engines
        params: list[str | float | None] = [*given, flops_per_s, bytes_per_s]
        found = self._database.sql(f"WITH found AS ({sql}) {_EFFICIENCIES}", params=params).to_arrow_table()
        columns = {"run_id": pa.array([self._run_id] * found.num_rows, pa.string())}
        columns |= {name: found.column(name) for name in schema.names if name != "run_id"}
        with Spool(table_path(self._folder, name, self._run_id), schema) as spool:
            spool.write(pa.table(columns).cast(schema))
            return spool.finish()


_EFFICIENCIES = """
    SELECT *,
        flops / nullif(engine_s * CAST(? AS DOUBLE), 0) AS mfu,
        bytes / nullif(engine_s * CAST(? AS DOUBLE), 0) AS mbu,
        roofline_s / nullif(engine_s, 0) AS roofline_efficiency
    FROM found ORDER BY 1
"""
# A sum of which one part is not known is not known. The engine's time is that of steps and what lies between them.
_PHASES = """
    SELECT phase,
        count(*) AS steps,
        sum(prefill_tokens - recomputed_tokens) AS prompt_tokens,
        sum(decode_tokens) AS decode_tokens,
        sum(sampled_tokens) AS sampled_tokens,
        sum(recomputed_tokens) AS recomputed_tokens,
        sum(padded_tokens) AS padded_tokens,
        sum(model_s) / ? AS device_s,
        sum(greatest(coalesce(interval_s, duration_s), duration_s)) / ? AS engine_s,
        sum(flops) AS flops,
        sum(bytes)::DOUBLE AS bytes,
        CASE WHEN count(*) = count(roofline_s) THEN sum(roofline_s) / ? END AS roofline_s
    FROM read_parquet(?) GROUP BY phase
"""
_BUCKETS = """
    WITH requests AS (FROM read_parquet(?)), whole AS (SELECT sum(ran_device_s) AS s FROM requests)
    SELECT CAST(2 ** ceil(log2(greatest(prompt_tokens, 1))) AS BIGINT) AS most_prompt_tokens,
        count(*) AS requests,
        sum(rows) AS rows,
        sum(prompt_tokens) AS prompt_tokens,
        sum(cached_tokens) AS cached_tokens,
        sum(completion_tokens) AS completion_tokens,
        sum(device_s) AS device_s,
        sum(ran_device_s) AS ran_device_s,
        CAST(? AS DOUBLE) * sum(ran_device_s) / nullif(any_value(whole.s), 0) AS engine_s,
        CASE WHEN count(*) = count(flops) THEN sum(flops) END AS flops,
        sum(bytes) AS bytes,
        CASE WHEN count(*) = count(roofline_s) THEN sum(roofline_s) / ? END AS roofline_s,
        quantile_cont(latency_s, 0.5) AS latency_p50_s,
        quantile_cont(latency_s, 0.99) AS latency_p99_s
    FROM requests, whole GROUP BY most_prompt_tokens
"""


def request_flops(cost: ModelCost, requests: Mapping[str, Floats]) -> NDArray[np.int64]:
    """Useful FLOPs of what each request ran, as `ModelCost.model_flops` counts them for steps."""
    ran, answered = ran_tokens(requests), answered_tokens(requests)
    end = requests["prompt_tokens"] + answered
    pairs = sum(_pairs(end, window) - _pairs(requests["cached_tokens"], window) for window in cost.windows)
    sampled = np.where(ran > 0, requests["completion_tokens"] - requests["forced_tokens"], 0)
    dense = 2 * (cost.active_parameters * (ran + answered) + cost.head_parameters * sampled)
    pair = sum(operator.pair.flops for operator in cost.operators)
    return np.asarray(np.round(dense + np.where(ran > 0, pair * pairs, 0)), np.int64)


def _pairs(tokens: Floats, window: int | None) -> Floats:
    """(query, key) pairs of the first so many tokens of one layer."""
    growing = tokens if window is None else np.minimum(tokens, window)
    return growing * (growing + 1) / 2 + (tokens - growing) * growing


def _numbers(table: pa.Table) -> Columns:
    """Nulls are NaN; NONE for a prefix."""
    found = {}
    for name in table.column_names:
        column = table.column(name)
        missing = NONE if name == "prefix" else np.nan
        found[name] = column.cast(pa.float64()).fill_null(missing).to_numpy()
    return found


def _batches(raw: Path) -> Iterator[tuple[pa.Table, Columns]]:
    with pq.ParquetFile(raw) as file:
        for batch in file.iter_batches(BATCH_ROWS):
            table = pa.Table.from_batches([batch], REQUEST_SCHEMA)
            yield table, _numbers(table.select(list(_REQUESTS)))


def _by_engine(
    requests: Columns, engines: Mapping[float, Apportionment]
) -> Iterator[tuple[Apportionment, Columns]]:
    for number, engine in engines.items():
        some = requests["engine"] == number
        yield engine, {name: values[some] for name, values in requests.items()}


def _shares(requests: Columns, engines: Mapping[float, Apportionment]) -> dict[str, Share]:
    """Of these requests, whichever engine ran them. Those of an engine without a step got nothing."""
    count = len(requests["engine"])
    found = {name: Share(np.zeros(count), np.zeros(count)) for name in ("model_s", "bytes", "roofline_s")}
    for number, engine in engines.items():
        some = requests["engine"] == number
        for name, share in engine.shares({n: v[some] for n, v in requests.items()}).items():
            found[name].prompt[some], found[name].answer[some] = share
    return found
