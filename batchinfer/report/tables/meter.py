"""Counts what a run costs while it runs: totals in memory, the rows themselves straight to disk."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from batchinfer.core.request import Request
from batchinfer.core.samples import RequestSample, StepSample
from batchinfer.machine.energy import EnergyMeter, EnergyUse
from batchinfer.report.tables.columns import REQUEST_SCHEMA, REQUESTS, STEP_SCHEMA, STEPS
from batchinfer.report.tables.details import Details, Machine
from batchinfer.report.tables.folder import table_path
from batchinfer.report.tables.launches import LaunchCounts
from batchinfer.report.tables.percentiles import UNKNOWN, Spread, opened, spread, weighted_spread
from batchinfer.report.tables.prefixes import PrefixTree
from batchinfer.report.tables.spool import BUFFER_ROWS, Spool
from batchinfer_kernels.cost import Peaks


@dataclass(slots=True)
class Totals:
    """Sums over the samples so far; `run_row` turns them into the run table's columns."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    padded_tokens: int = 0
    preemptions: int = 0
    forced_tokens: int = 0
    mask_s: float = 0.0
    compile_s: float = 0.0
    launches: LaunchCounts = field(default_factory=LaunchCounts)
    capture_s: float | None = None  # None: no step says
    graph_bytes: int | None = None  # None: no step says
    flops: int = 0
    bytes_moved: int = 0
    step_s: float = 0.0
    model_s: float = 0.0
    idle_s: float = 0.0
    waited_s: float = 0.0  # of it: there was nothing to run
    metering_s: float = 0.0
    roofline_s: float | None = 0.0  # None as soon as one step does not know it
    step_bound_s: float | None = 0.0  # None without peaks
    requests: int = 0
    output_tokens: int = 0
    constrained_requests: int = 0
    steered_requests: int = 0

    @property
    def wall_s(self) -> float:
        """Start of the first step to end of the last, without the time between two engines."""
        return self.step_s + self.idle_s

    def share_time(self, engines: int, unused_s: float) -> None:
        """Make all seconds the mean of so many engines, which had nothing to do for `unused_s` in sum while others
        worked."""
        self.idle_s += unused_s
        for name in _SHARED_S:
            value = getattr(self, name)
            setattr(self, name, None if value is None else value / engines)

    def add_step(self, sample: StepSample, idle_s: float, peaks: Peaks | None) -> None:
        self.steps += 1
        self.prefill_tokens += sample.prefill_tokens
        self.decode_tokens += sample.decode_tokens
        self.recomputed_tokens += sample.recomputed_tokens
        self.cached_tokens += sample.cached_tokens
        self.sampled_tokens += sample.sampled_tokens
        self.padded_tokens += sample.padded_tokens
        self.preemptions += sample.preemptions
        self.forced_tokens += sample.forced_tokens
        self.mask_s += sample.mask_s
        self.compile_s += sample.compile_s
        self.launches.add(sample.launch, sample.prefill_tokens + sample.decode_tokens)
        if sample.capture_s is not None:
            self.capture_s = (self.capture_s or 0.0) + sample.capture_s
        if sample.graph_bytes is not None:
            self.graph_bytes = (self.graph_bytes or 0) + sample.graph_bytes
        self._add_cost(sample, peaks)
        self.step_s += sample.duration_s
        self.model_s += sample.model_s
        self.idle_s += idle_s
        self.metering_s += sample.metering_s

    def _add_cost(self, sample: StepSample, peaks: Peaks | None) -> None:
        self.flops += sample.flops
        self.bytes_moved += sample.bytes
        bound = None if peaks is None else _bound(sample, peaks)
        self.roofline_s = _sum(self.roofline_s, sample.roofline_s)
        self.step_bound_s = _sum(self.step_bound_s, bound)


_SHARED_S = (
    "mask_s", "compile_s", "step_s", "model_s", "idle_s", "waited_s", "metering_s", "capture_s",
    "roofline_s", "step_bound_s",
)  # fmt: skip


def _bound(sample: StepSample, peaks: Peaks) -> float:
    """A step as one operator. Which of its operations are int8 it does not say: all count as the fastest kind."""
    return max(sample.flops / peaks.fastest, sample.bytes / peaks.bytes_per_s)


def _sum(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left + right


@dataclass(frozen=True, slots=True)
class Measured:
    """What the meter knows at the end: the totals, and the latencies' percentiles."""

    totals: Totals
    queue: Spread = UNKNOWN
    ttft: Spread = UNKNOWN
    tpot: Spread = UNKNOWN
    itl: Spread = UNKNOWN
    latency: Spread = UNKNOWN
    device: Mapping[str, float] = field(default_factory=dict)  # parts of `model_s`; empty: not known
    energy: EnergyUse = field(default_factory=EnergyUse)


_UNKNOWN_MACHINE = Machine()


class Meter:
    """Takes samples as they arrive; it keeps sums, and some 56 bytes for each prefix that requests share.

    Samples of several engines may follow one another (a worker that died and was started again): the time in between
    counts neither as run nor as idle. Where several engines share the work, all times of the totals are the mean of
    theirs, and one that ends before the others counts as idle until the last one ends.
    The tables appear in `folder` at `finish`; as a context manager it removes what was not finished.

    It sums up what it takes itself, and what the engine says that its part took, as `metering_s`.
    """

    def __init__(
        self,
        folder: Path,
        run_id: str,
        machine: Machine = _UNKNOWN_MACHINE,
        buffer_rows: int = BUFFER_ROWS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.totals = Totals()
        self._folder, self._run_id, self._machine = folder, run_id, machine
        self._steps = Spool(table_path(folder, STEPS, run_id), STEP_SCHEMA, buffer_rows)
        raw = table_path(folder, REQUESTS, run_id).with_suffix(".raw.parquet")
        self._requests = Spool(raw, REQUEST_SCHEMA, buffer_rows)  # without what is known at the end only
        self._last: dict[int, StepSample] = {}  # of each engine
        self._walls_s: dict[int, float] = {}  # of each replica, from first to last steps
        self._prefixes: PrefixTree | None = None
        self._prefix_of: dict[bytes, int] = {}  # of requests that have not finished
        self._spent_ns = 0
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
        """Requests share prefixes: from here on these are looked for."""
        self._prefixes = PrefixTree()

    def begin_energy(self, meter: EnergyMeter) -> None:
        """The engine is ready: from here on energy counts as its."""
        self._energy_meter = meter

    def end_energy(self) -> None:
        """The engine has ended."""
        if self._energy_meter is not None:
            self._energy, self._energy_meter = self._energy_meter.read(), None

    def planned(self, requests: Sequence[Request]) -> None:
        """These requests go to the engine, in this order."""
        if self._prefixes is None:
            return
        began = time.perf_counter_ns()
        for request in requests:
            node = self._prefixes.add(request)
            if node is not None:
                self._prefix_of[request.key] = node
        self._spent_ns += time.perf_counter_ns() - began

    def step(self, sample: StepSample, engine: int = 0, replica: int = 0) -> None:
        """Count one step of the run's `engine`-th engine, whose place is that of `replica`."""
        began = time.perf_counter_ns()
        last = self._last.get(engine)
        self._last[engine] = sample
        interval = None if last is None else _ended(sample) - _ended(last)
        idle = 0.0 if interval is None else max(0.0, interval - sample.duration_s)
        self._walls_s[replica] = self._walls_s.get(replica, 0.0) + sample.duration_s + idle
        if last is not None and not (last.running or last.waiting):
            self.totals.waited_s += idle
        self.totals.add_step(sample, idle, self._machine.peaks)
        self._steps.append(_step_row(self._run_id, (engine, replica), sample, interval))
        if self._energy_meter is not None:
            self._energy_meter.poll()
        self._spent_ns += time.perf_counter_ns() - began

    def request(self, sample: RequestSample, rows: int = 1, engine: int = 0, replica: int = 0) -> None:
        """Count one request that an engine finished, which answers so many input rows."""
        began = time.perf_counter_ns()
        self.totals.requests += 1
        self.totals.output_tokens += sample.completion_tokens
        self.totals.constrained_requests += sample.constrained
        self.totals.steered_requests += sample.steered
        prefix = self._prefix_of.pop(sample.key, None)
        self._requests.append(_request_row(self._run_id, (engine, replica), sample, rows, prefix))
        self._spent_ns += time.perf_counter_ns() - began

    def finish(self) -> Measured:
        """Complete all tables and read the percentiles from them. Raises OSError when the disk fails."""
        began = time.perf_counter_ns()
        self.totals.share_time(self._machine.engines, self._unused_s())
        steps = self._steps.finish()
        with opened() as database:
            details = Details(self._folder, self._run_id, steps, self._machine, database)
            requests = self._write_requests(details)
            details.write_phases()
            details.write_buckets(requests, self.totals.wall_s)
            found = self._measured(database, steps, requests, details.split())
        self.totals.metering_s += (self._spent_ns + time.perf_counter_ns() - began) / 1e9
        return found

    def _write_requests(self, details: Details) -> Path:
        raw = self._requests.close()
        try:
            nodes = (self._prefixes or PrefixTree()).close()
            requests = details.write_requests(raw, nodes)
        finally:
            raw.unlink(missing_ok=True)
        nodes.write(self._folder, self._run_id)
        return requests

    def _measured(self, database: Any, steps: Path, requests: Path, device: Mapping[str, float]) -> Measured:
        return Measured(
            totals=self.totals,
            queue=spread(database, requests, "queue_s"),
            ttft=spread(database, requests, "ttft_s"),
            tpot=spread(database, requests, "tpot_s"),
            itl=weighted_spread(database, steps, "interval_s", "decode_tokens"),
            latency=spread(database, requests, "latency_s"),
            device=device,
            energy=self._energy,
        )

    def _unused_s(self) -> float:
        """What the engines lack, in sum, to the one that worked longest."""
        return max(self._walls_s.values(), default=0.0) * self._machine.engines - sum(self._walls_s.values())


def _ended(sample: StepSample) -> float:
    return sample.started_s + sample.duration_s


def _step_row(
    run_id: str, engine: tuple[int, int], s: StepSample, interval_s: float | None
) -> tuple[object, ...]:
    times = (s.started_s, s.duration_s, interval_s, s.model_s)
    tokens = (s.prefill_tokens, s.decode_tokens, s.recomputed_tokens, s.cached_tokens, s.sampled_tokens)
    state = (s.padded_tokens, s.running, s.waiting, s.preemptions, s.blocks_used, s.blocks_total)
    constraints = (s.forced_tokens, s.mask_s, s.compile_s)
    counts = (s.pairs, s.kv_tokens, s.metering_s, s.copied_tokens)
    more = (_phase(s), s.scheduled_s, s.started_s + s.duration_s, *counts)
    cost = (s.flops, s.bytes, s.roofline_s)
    launch = (s.launch, s.capture_s, s.graph_bytes)
    return (run_id, *engine, s.step, *times, *tokens, *state, *cost, *constraints, *more, *launch)


def _phase(sample: StepSample) -> str:
    if not sample.prefill_tokens:
        return "decode"
    return "mixed" if sample.decode_tokens else "prefill"


def _request_row(
    run_id: str, engine: tuple[int, int], s: RequestSample, rows: int, prefix: int | None
) -> tuple[object, ...]:
    counts = (s.prompt_tokens, s.completion_tokens, s.cached_tokens, s.preemptions, s.forced_tokens)
    ended = s.unrun_tokens, s.cut
    times = (s.queued_s, s.scheduled_s, s.first_token_s, s.finished_s)
    waits = (s.scheduled_s - s.queued_s, s.first_token_s - s.queued_s)
    known = (tpot(s), s.finished_s - s.queued_s, rows, prefix)
    return (run_id, s.key.hex(), *engine, *counts, *ended, *times, *waits, *known, *_NOT_YET)


_NOT_YET = (None,) * 6  # what `Details` adds


def tpot(sample: RequestSample) -> float | None:
    """Seconds per output token after the first; None where there is no second token."""
    if sample.completion_tokens < 2:
        return None
    return (sample.finished_s - sample.first_token_s) / (sample.completion_tokens - 1)
