"""Collects samples of steps and requests: writes them to disk during the run, and sums them up at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from batchinfer.core.request import Request
from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.machine.energy import EnergyMeter, EnergyUse
from batchinfer.machine.folders import make_folder
from batchinfer.report.tables.columns.declared import COLUMNS, REQUESTS, SCHEMAS, STEPS, sampled_columns
from batchinfer.report.tables.details import Details, Machine, open_database
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.prefixes import PrefixTree
from batchinfer.report.tables.spool import BUFFER_ROWS, Spool

# Columns of the run table, and `waited_s`, the part of `idle_s` in which engines had no rows
Measured = dict[str, Any]

# Columns of steps and requests that the meter adds to the columns of samples
_GIVEN_OF_STEP = ("run_id", "engine", "replica", "interval_s", "ended_s", "phase")
_GIVEN_OF_REQUEST = ("run_id", "key", "engine", "replica", "rows")
_OF_STEP = sampled_columns(COLUMNS[STEPS], StepSample)
_OF_REQUEST = sampled_columns(COLUMNS[REQUESTS], RequestSample)
_step_values = attrgetter(*_OF_STEP)
_request_values = attrgetter(*_OF_REQUEST)
_UNKNOWN_MACHINE = Machine()


class Meter:
    """Records the steps and requests of a run, and writes its report tables.

    With several replicas, total times are means over replicas. The tables appear in the folder at `finish`. A
    context manager, which removes unfinished tables.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        machine: Machine = _UNKNOWN_MACHINE,
        buffer_rows: int = BUFFER_ROWS,
    ) -> None:
        """Create the report tables of a run.

        Args:
            folder: The folder of report tables.
            run_id: The id of the run.
            machine: The model and the hardware.
            buffer_rows: Maximum rows per table in memory.
        """
        make_folder(folder)
        self._folder, self._run_id, self._machine = folder, run_id, machine
        path, given = table_path(folder, STEPS, run_id), (*_GIVEN_OF_STEP, *_OF_STEP)
        self._steps = Spool(path, SCHEMAS[STEPS], buffer_rows, given)
        # without the columns that are computed at the end
        known = (SCHEMAS[REQUESTS].field(name) for name in (*_GIVEN_OF_REQUEST, *_OF_REQUEST))
        raw = pa.schema([*known, pa.field("place", pa.int64())])
        path = table_path(folder, REQUESTS, run_id).with_suffix(".raw.parquet")
        self._requests = Spool(path, raw, buffer_rows)
        self._last: dict[int, StepSample] = {}  # the last step of each engine
        self._waited_s = 0.0  # idle time in which an engine had no rows
        # Requests with a constraint; see `steered_requests` of the run table
        self._constrained = self._steered = 0
        self._prefixes: PrefixTree | None = None
        self._place_of: dict[bytes, int] = {}  # positions of unfinished requests in the prefix tree
        self._spent_ns = 0  # time spent in the methods of this class
        self._energy_meter: EnergyMeter | None = None
        self._energy = EnergyUse()

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._steps.abort()
        self._requests.abort()

    def share_prefixes(self) -> None:
        """Begin to record which prefixes requests share. Without this call, none are recorded."""
        self._prefixes = PrefixTree()

    def begin_energy(self, meter: EnergyMeter) -> None:
        """Measure the energy of the machine with `meter` from now on."""
        self._energy_meter = meter

    def end_energy(self) -> None:
        """Stop measuring energy, and keep the result for the run table."""
        if self._energy_meter is not None:
            self._energy, self._energy_meter = self._energy_meter.read(), None

    def record_order(self, requests: Sequence[Request]) -> None:
        """Record the order in which requests are submitted to engines.

        The table of prefixes follows from it.
        """
        if self._prefixes is None:
            return
        began = time.perf_counter_ns()
        for request in requests:
            self._place_of[request.key] = self._prefixes.add(request)
        self._spent_ns += time.perf_counter_ns() - began

    def step(self, sample: StepSample, engine: int = 0, replica: int = 0) -> None:
        """Record an engine step.

        Args:
            sample: The counts and times of the step.
            engine: The number of the engine's process in the run.
            replica: The number of the replica.
        """
        began = time.perf_counter_ns()
        last, ended = self._last.get(engine), _ended(sample)
        self._last[engine] = sample
        interval = None if last is None else ended - _ended(last)
        if last is not None and interval is not None and not (last.running or last.waiting):
            self._waited_s += max(0.0, interval - sample.duration_s)
        given = (self._run_id, engine, replica, interval, ended, _phase(sample))
        self._steps.append(given + _step_values(sample))
        if self._energy_meter is not None:
            self._energy_meter.poll()
        self._spent_ns += time.perf_counter_ns() - began

    def request(self, sample: RequestSample, rows: int = 1, engine: int = 0, replica: int = 0) -> None:
        """Record a finished request.

        Args:
            sample: The counts and times of the request.
            rows: The number of input rows that it answers.
            engine: The number of the engine's process in the run.
            replica: The number of the replica.
        """
        began = time.perf_counter_ns()
        self._constrained += sample.constrained
        self._steered += sample.steered
        place = self._place_of.pop(sample.key, None)
        given = (self._run_id, sample.key.hex(), engine, replica, rows)
        self._requests.append((*given, *_request_values(sample), place))
        self._spent_ns += time.perf_counter_ns() - began

    @property
    def requests(self) -> int:
        """Return the number of finished requests that the meter has recorded."""
        return self._requests.rows

    def finish(self) -> Measured:
        """Complete all report tables, and return the columns of the run table that follow from them.

        Raises:
            OSError: A table cannot be written.
        """
        began = time.perf_counter_ns()
        steps = self._steps.finish()
        with open_database() as database:
            details = Details(self._folder, self._run_id, steps, self._machine, database)
            self._write_requests(details)
            found = details.sums() | self._counted()
            details.write_phases()
            details.write_buckets(found["engine_wall_s"])
        found["metering_s"] += (self._spent_ns + time.perf_counter_ns() - began) / 1e9
        return found

    def _write_requests(self, details: Details) -> None:
        raw = self._requests.close()
        try:
            nodes = (self._prefixes or PrefixTree()).close()
            details.write_requests(raw, nodes)
        finally:
            raw.unlink(missing_ok=True)
        nodes.write(self._folder, self._run_id)

    def _counted(self) -> Measured:
        return {
            "constrained_requests": self._constrained,
            "steered_requests": self._steered,
            "waited_s": self._waited_s / self._machine.engines or None,
            "energy_j": self._energy.total_j,
            "cpu_energy_j": self._energy.cpu_j,
            "gpu_energy_j": self._energy.gpu_j,
        }


def _ended(sample: StepSample) -> float:
    return sample.started_s + sample.duration_s


def _phase(sample: StepSample) -> str:
    if not sample.prefill_tokens:
        return "decode"
    return "mixed" if sample.decode_tokens else "prefill"
