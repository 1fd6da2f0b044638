"""Collects the facts of a run from all stages, and writes its report tables, also after a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import duckdb
import numpy as np
from numpy.typing import NDArray

from batchinfer.core.errors import BatchInferError, classify_error
from batchinfer.core.hub import describe_model
from batchinfer.core.samples import ExpertTokens
from batchinfer.core.text import json_line
from batchinfer.engine.config import EngineInfo
from batchinfer.filesystem.durable import FileOps, write_bytes
from batchinfer.job import Job
from batchinfer.machine.energy import EnergyMeter
from batchinfer.machine.memory import peak_memory
from batchinfer.plan.expert_plan import ExpertPlan
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.setup.setting import Setting
from batchinfer.report.stopwatch import OTHER, STARTUP, Stopwatch
from batchinfer.report.tables.activities import Activity, write_activities
from batchinfer.report.tables.columns.declared import RUN, SCHEMAS
from batchinfer.report.tables.columns.of_tasks import OF_OUTPUT, OF_PREFIXES, WITHOUT_OUTPUT
from batchinfer.report.tables.details import Machine
from batchinfer.report.tables.expert_tokens import write_experts
from batchinfer.report.tables.folder import LAST_RUN, new_run_id, report_folder, table_path
from batchinfer.report.tables.meter import Measured, Meter
from batchinfer.report.tables.ranks import EngineRank, rank_columns, write_ranks
from batchinfer.report.tables.row_keys import RowKeysWriter, write_rows
from batchinfer.report.tables.tables import RunRow, run_row, write_run
from batchinfer.store.index.index import attempt_columns
from batchinfer_kernels.cost import ModelCost

COMMAND = "command"  # the name of this process in the activities table
_ACTIVITIES = {
    STARTUP: "starting",
    "ingest_s": "reading",
    "plan_s": "planning",
    "load_s": "waiting for an engine",
    "engine_s": "feeding the engines",
    "publish_s": "publishing",
    "close_s": "closing",
    OTHER: "other",
}
# Runs with more requests complete their tables after publishing: for ten million requests, doing both in parallel would
# take more memory than running the engine
MAX_OVERLAPPED_REQUESTS = 2_000_000


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        exit_code: The exit code of the command.
        row: This run's row of the run table.
        error: The reason for an exit code other than 0.
        report: The file of the run table. None if the run changed nothing.
    """

    exit_code: int
    row: RunRow
    error: str | None = None
    report: Path | None = None


class RunReport:
    """Collects the facts of one run, and writes the tables of its report.

    Call `complete` or `complete_failed` at the end of the run, then `close` to write the tables.
    """

    def __init__(self, job: Job, setting: Setting, watch: Stopwatch) -> None:
        """Start the report of a run.

        Args:
            job: The job.
            setting: Device, arithmetic, memory and parallelism of the run.
            watch: The stopwatch that started with the command.
        """
        self._job, self._setting, self._watch = job, setting, watch
        self.folder = report_folder(job.results_root)
        self._run_id = new_run_id()
        self._started = datetime.now(UTC) - timedelta(seconds=sum(watch.read().values()))
        self._facts: dict[str, Any] = setting.facts
        self._facts |= {} if setting.parts.draft_model is None else {"draft_model_runs": "beside"}
        self._meter: Meter | None = None
        self._sums: Future[Measured] | None = None  # the meter's sums, if a thread computes them
        self._measured: Measured | None = None
        self._row: RunRow | None = None
        self._message: str | None = None  # the reason for an exit code other than 0
        self._expert_tokens: ExpertTokens = {}
        self._ranks: Sequence[EngineRank] = ()
        self._activities: list[Activity] = []
        self._kept = True

    def note(self, **facts: Any) -> None:
        """Set columns of this run's row of the run table.

        Args:
            facts: Values by name of the column.

        Raises:
            ValueError: The run table has no such column.
        """
        if unknown := facts.keys() - set(SCHEMAS[RUN].names):
            raise ValueError(f"the run table has no column {', '.join(sorted(unknown))}")
        self._facts |= facts

    def timed(self, phase: str) -> AbstractContextManager[None]:
        """Measure the time of the block for a phase of the run.

        If phases are nested, time in the inner phase does not count for the outer phase.

        Args:
            phase: The column of the run table with the time of the phase.
        """
        return self._watch.timed(phase)

    def record_activity(
        self, process: str, activity: str, began: float, ended: float, *on: str | None
    ) -> None:
        """Add an entry to the report's table of activities.

        Args:
            process: Name of the process.
            activity: Name of the activity.
            began: Start of the activity, a time of `time.perf_counter`.
            ended: End of the activity, a time of `time.perf_counter`.
            on: The node and its machine class, for a process on a cluster. Else empty.
        """
        self._activities.append(
            Activity(process, activity, self._watch.at(began), self._watch.at(ended), *on)
        )
        if nodes := {one.node for one in self._activities} - {None}:
            self.note(machines=len(nodes))

    def start_row_keys(self, index_parts: Sequence[Path], ids: str) -> RowKeysWriter:
        """Start to write the report's table of rows in another thread, for a job with one attempt per row.

        Args:
            index_parts: Parquet files of the index.
            ids: Name of the result's column with the ids of rows.
        """
        return RowKeysWriter(self.folder, self._run_id, index_parts, ids)

    def keep_keys(self, index_parts: Sequence[Path], attempts: NDArray[np.uint8], ids: str) -> None:
        """Write the report's table of rows for the result that was just published.

        Args:
            index_parts: Parquet files of the index.
            attempts: Number of the attempt that answered each row, from 1 on. Shape: [rows].
            ids: Name of the result's column with the ids of rows.

        Raises:
            OSError: The table cannot be written.
        """
        columns = [attempt_columns(number)[0] for number in range(1, int(attempts.max(initial=1)) + 1)]
        write_rows(self.folder, self._run_id, index_parts, columns, attempts - 1, ids)

    def record_plan(self, plan: Plan, seen: EngineForecast | None) -> None:
        """Record the counts of a plan and the forecast of its engine time in the run table.

        Args:
            plan: The plan.
            seen: The forecast. None if no forecast was made.
        """
        self.note(
            distinct_requests=plan.distinct,
            duplicate_rows=plan.duplicates,
            reused_requests=plan.present,
            duplicate_saved_tokens=0,
            duplicate_saved_output_tokens=0,
        )
        if seen is not None:
            self.note(
                forecast_s=seen.seconds,
                forecast_steps=seen.run.steps,
                forecast_prompt_tokens=seen.run.prompt_tokens,
                forecast_recomputed_tokens=seen.run.recomputed_tokens,
                forecast_output_tokens=seen.run.output_tokens,
                forecast_mfu=seen.mfu,
                forecast_mbu=seen.mbu,
                forecast_basis=seen.times.basis,
                forecast_answers_from=seen.answers_from,
                **{f"forecast_{name}": number for name, number in (seen.run.launches or {}).items()},
            )

    def open_meter(self, setting: Setting, cost: ModelCost) -> Meter:
        """Create and return the meter, which records samples of steps and requests for the report.

        Args:
            setting: Device, arithmetic, memory and parallelism of the engines.
            cost: FLOPs and bytes of the model's steps.
        """
        self._setting, placement = setting, setting.placement
        self.note(replicas=placement.replicas, ranks=placement.division.ranks)
        self._meter = Meter(self.folder, self._run_id, Machine(cost, setting.peaks, placement.replicas))
        return self._meter

    def start_measuring(self, infos: Sequence[EngineInfo]) -> None:
        """Start to measure the energy of engines. Does nothing without a meter or an engine.

        Args:
            infos: The engines that are ready.
        """
        if self._meter is None or not infos:
            return
        self._meter.begin_energy(EnergyMeter.of([info.gpu for info in infos if info.gpu]))
        if self._setting.parts.shares_prefixes:
            self._meter.share_prefixes()

    @property
    def has_meter(self) -> bool:
        """Return True if this run has a meter: it started engines, and its report is not complete yet."""
        return self._meter is not None

    def record_engines(
        self,
        infos: Sequence[EngineInfo],
        worker_peak_rss: int | None,
        other_cores: float | None = None,
        expert_tokens: ExpertTokens = MappingProxyType({}),
        ranks: Sequence[EngineRank] = (),
    ) -> None:
        """Record facts of the engines after they have ended.

        Args:
            infos: The engines that became ready.
            worker_peak_rss: Sum of the peak memory of all workers in bytes. None if unknown.
            other_cores: Mean number of CPU cores that other processes used. None if unknown.
            expert_tokens: By index of the layer, the number of tokens that each expert has computed.
            ranks: Usage of each rank, for engines with several ranks.
        """
        self._expert_tokens, self._ranks = expert_tokens, ranks
        self._note_experts(self._setting.parts.experts)
        if self._meter is not None:
            self._meter.end_energy()
            self._sum_up(self._meter)
        self.note(worker_peak_rss_bytes=worker_peak_rss, other_cores=other_cores, **rank_columns(ranks))
        if infos:
            linear = {"linear": infos[0].linear} if infos[0].linear else {}
            threads = sum(info.threads * info.division.ranks for info in infos)
            self.note(ops={"decoder": infos[0].ops} | linear, threads=threads)
            self.note(**_captured(infos))

    def _note_experts(self, plan: ExpertPlan | None) -> None:
        if plan is None:
            return
        tokens = self._expert_tokens
        given = any(map(any, tokens.values()))
        self.note(
            expert_placement="ranges" if plan.placement is None else "loads",
            expert_copies=plan.repeated,
            expert_imbalance=plan.imbalance(tokens) if given else None,
        )

    def _sum_up(self, meter: Meter) -> None:
        if meter.requests <= MAX_OVERLAPPED_REQUESTS:
            thread = ThreadPoolExecutor(1, "report")
            self._sums = thread.submit(meter.finish)
            thread.shutdown(wait=False)

    def complete(self, status: str, exit_code: int = 0, message: str | None = None) -> RunRow:
        """Complete this run's row of the run table, and return it. A second call changes only the message.

        Args:
            status: The `exit_status` of the run table.
            exit_code: The exit code of the command.
            message: The reason for an exit code other than 0.
        """
        if self._row is None:
            self._row = self._finished_row(status, exit_code)
        self._message = message or self._message
        return self._row

    def complete_failed(self, error: BaseException) -> None:
        """Complete this run's row of the run table for a run that ends with an error."""
        meant = classify_error(error)
        self._message = str(meant)
        self.complete(meant.status, meant.exit_code)

    def close(self) -> None:
        """Write the tables of the report: run, activities, and experts and ranks if there are any.

        Does nothing after `discard`.

        Raises:
            OSError: A table cannot be written.
        """
        row = self.row
        if not self._kept:
            return
        if self._expert_tokens:
            write_experts(self.folder, self._run_id, self._expert_tokens)
        if self._ranks:
            write_ranks(self.folder, self._run_id, self._ranks)
        FileOps().mkdir(self.folder)
        spans = self._watch.spans
        own = [Activity(COMMAND, _ACTIVITIES[phase], began, ended) for phase, began, ended in spans]
        write_activities(self.folder, self._run_id, [*own, *self._activities])
        write_run(self.folder, row)

    @property
    def row(self) -> RunRow:
        """Return this run's row of the run table. Call `complete` or `complete_failed` first."""
        return self.complete(BatchInferError.status, BatchInferError.exit_code)

    def write_last(self, ops: FileOps) -> None:
        """Write this run's row of the run table to `last_run.json`, which replaces the file of the run before.

        Args:
            ops: Creates folders and files.

        Raises:
            OSError: The folder cannot be created.
            StorageError: The file cannot be written.
        """
        path = None if self.path is None else str(self.path)
        text = json_line({**self.row, "message": self._message, "report": path})
        ops.mkdir(self.folder)
        write_bytes(self.folder / LAST_RUN, (text + "\n").encode(), ops)

    @property
    def identity(self) -> dict[str, str]:
        """Return the columns of the run table that identify this run: its ID, job, output folder and start."""
        return {
            "run_id": self._run_id,
            "job": self._job.name,
            "output": str(self._job.output.path),
            "started_at": self._started.isoformat(),
        }

    def discard(self) -> None:
        """Do not write the tables of the report at the end, because the run changed nothing."""
        self._kept = False

    @property
    def path(self) -> Path | None:
        """Return the file of the run table, or None if the report is discarded."""
        return table_path(self.folder, RUN, self._run_id) if self._kept else None

    def _finished_row(self, status: str, exit_code: int) -> RunRow:
        # removed first, because a signal may interrupt `finish`, which must not be called twice
        meter, self._meter = self._meter, None
        with self.timed("close_s"):
            if meter is not None:
                self._measured = meter.finish() if self._sums is None else self._sums.result()
        phases = self._watch.read()
        self.note(
            run_id=self._run_id,
            job=self._job.name,
            task=self._job.task,
            output=str(self._job.output.path),
            model=describe_model(self._job.model.path),
            started_at=self._started,
            finished_at=self._started + timedelta(seconds=sum(phases.values())),
            exit_code=exit_code,
            exit_status=status,
            parent_peak_rss_bytes=peak_memory(),
            **phases,
        )
        return run_row(self._facts, self._setting.placement.hardware, self._measured, self._meaningless())

    def _meaningless(self) -> Sequence[str]:
        without = OF_OUTPUT if self._job.task in WITHOUT_OUTPUT else ()
        runs_whole = self._job.engine.enable_prefix_caching and not self._setting.parts.shares_prefixes
        return [*without, *(OF_PREFIXES if runs_whole else ())]


@contextmanager
def errors_as_notice(notice: Callable[[str], None]) -> Iterator[None]:
    """Show errors of the block as a notice, so that they do not hide the outcome of the run.

    Args:
        notice: Called with the text of an error.
    """
    try:
        yield
    except (OSError, BatchInferError, duckdb.Error, MemoryError, ArithmeticError, ValueError) as error:
        notice(f"the report of this run could not be written: {error}")


def _captured(infos: Sequence[EngineInfo]) -> dict[str, float | None]:
    seconds = [info.capture_s for info in infos if info.capture_s is not None]
    graphs = [info.graph_bytes for info in infos if info.graph_bytes is not None]
    free = [info.free_bytes for info in infos if info.free_bytes is not None]
    return {
        "load_capture_s": max(seconds, default=None),
        "load_graph_bytes": max(graphs, default=None),
        "load_free_bytes": min(free, default=None),
    }
