"""The history of a job: compares the speed of the newest run with earlier runs. Does no input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from statistics import median

from batchinfer.core.wording import UNKNOWN, count, percent, seconds, short_number
from batchinfer.report.tables.exit_status import is_published

HISTORY = "history"  # its name among the tables of `batchinfer query`
# Shorter runs are not compared: filling the first batches and waiting for the last rows takes one or two seconds, which
# would hide the slowdowns of interest.
LEAST_S = 5.0
LAST_RUNS = 10  # number of earlier runs in a comparison
FEWEST_RUNS = 3  # the median of three runs is robust against one slow run
WORK_FACTOR = 4.0  # a run with far more work keeps its batches full for longer
# Prompt tokens cost far less than output tokens, so runs are only comparable with similar shares of both
MIX_FACTOR = 1.25
_TERA = 1e12


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run of a job, with numbers that are compared between runs: a row of the table `history`.

    None means unknown, or that the run computed nothing. Fields have the same meaning as the columns of the
    run table with the same name. `tokens` counts computed prompt tokens and output tokens, and
    `tokens_per_tflop` is tokens per second for each TFLOP/s of the peak.
    """

    run_id: str
    job: str | None = None
    output: str | None = None
    started_at: datetime | None = None
    exit_code: int | None = None
    exit_status: str | None = None
    trial: bool | None = None
    model: str | None = None
    device: str | None = None
    hardware: str | None = None
    cores: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    deterministic: bool | None = None
    rows: int | None = None
    rows_error: int | None = None
    computed_requests: int | None = None
    prompt_tokens_run: int | None = None
    output_tokens: int | None = None
    tokens: int | None = None
    engine_wall_s: float | None = None
    total_tokens_per_s: float | None = None
    peak_flops_per_s: float | None = None
    tokens_per_tflop: float | None = None
    roofline_efficiency: float | None = None
    wall_s: float | None = None
    engine_s: float | None = None
    forecast_s: float | None = None
    forecast_error: float | None = None
    other_cores: float | None = None
    energy_j: float | None = None
    cost: float | None = None
    labelled_rows: int | None = None
    accuracy: float | None = None
    normalised_accuracy: float | None = None
    calibration_error: float | None = None
    brier_score: float | None = None

    @property
    def output_share(self) -> float:
        """Return the share of output tokens among all computed tokens of the run, from 0 to 1."""
        return (self.output_tokens or 0) / self.tokens if self.tokens else 0.0

    @property
    def machine(self) -> tuple[str | None, int | None]:
        """Return the hardware of the run and its number of cores, which together identify the machine."""
        return self.hardware, self.cores


_DERIVED = {
    "tokens": "prompt_tokens_run + coalesce(output_tokens, 0)",
    "tokens_per_tflop": f"total_tokens_per_s / nullif(peak_flops_per_s, 0) * {_TERA:.0f}",
}


def history_sql(run: str) -> str:
    """Return a SQL query for the columns of `PastRun`, oldest run first.

    Args:
        run: The run table, as SQL.
    """
    columns = (f"{_DERIVED.get(one.name, one.name)} AS {one.name}" for one in fields(PastRun))
    return f"SELECT {', '.join(columns)} FROM {run} ORDER BY run_id"


def why_unfit(run: PastRun) -> str | None:
    """Return why a run's speed is not compared with other runs, such as "a trial", or None if it can be."""
    if run.trial:
        return "a trial"
    if not run.tokens or run.total_tokens_per_s is None or run.engine_wall_s is None:
        return "computed nothing"
    if not is_published(run.exit_status):
        return "did not finish"  # output tokens are counted when a request ends: those in work are missing
    if run.engine_wall_s < LEAST_S:
        return f"computed for less than {seconds(LEAST_S)}"
    return None


_SAME = {
    "job": "another job",
    "model": "another model",
    "device": "another device",
    "dtype": "another dtype",
    "quantization": "another quantization",
    "kv_cache_dtype": "another kv_cache_dtype",
    "deterministic": "another setting of deterministic",
}


def why_incomparable(run: PastRun, newest: PastRun) -> str | None:
    """Return why the speed of a run cannot be compared with the run `newest`, or None if it can.

    An example is "another model".
    """
    if (reason := why_unfit(run)) is not None:
        return reason
    for name, said in _SAME.items():
        if getattr(run, name) != getattr(newest, name):
            return said
    if run.machine != newest.machine and not (run.peak_flops_per_s and newest.peak_flops_per_s):
        return "another machine, and the peak of one is unknown"
    if _factor(run.tokens or 0, newest.tokens or 0) > WORK_FACTOR:
        return f"over {WORK_FACTOR:.0f} times more or less work"
    if _factor(run.output_share, newest.output_share) > MIX_FACTOR:
        return "another mixture of prompt and output tokens"
    return None


def _factor(one: float, other: float) -> float:
    low, high = sorted((one, other))
    return 1.0 if low == high else float("inf") if low == 0 else high / low


def _speed(run: PastRun, newest: PastRun) -> float:
    # On the same machine nothing is scaled, so a new measurement of the peak does not look like a change of
    # speed
    speed = run.total_tokens_per_s or 0.0
    if run.machine == newest.machine or not (run.peak_flops_per_s and newest.peak_flops_per_s):
        return speed
    return speed / run.peak_flops_per_s * newest.peak_flops_per_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """The speed of the newest run of a job, compared with the median of earlier comparable runs.

    Runs with a reason from `why_unfit`, such as trials, are not compared.

    Attributes:
        run_id: The newest run that can be compared. None: there is none.
        before: Number of comparable runs, at most LAST_RUNS.
        tokens_per_s: Tokens per second of the newest run.
        median_tokens_per_s: Median of the comparable runs. None: there are fewer than FEWEST_RUNS.
        spread: (fastest − slowest) ÷ median of the comparable runs.
        left_out: Number of runs that are not compared, by reason.
    """

    run_id: str | None
    before: int = 0
    tokens_per_s: float | None = None
    median_tokens_per_s: float | None = None
    spread: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def change(self) -> float | None:
        """Return the relative change of speed, or None without a median to compare with.

        −0.2 means a fifth fewer tokens per second than the median.
        """
        if self.tokens_per_s is None or not self.median_tokens_per_s:
            return None
        return self.tokens_per_s / self.median_tokens_per_s - 1

    def slower_than(self, share: float) -> bool:
        """Return True if the newest run is slower than the median by more than the fraction `share`."""
        return self.change is not None and self.change < -share


def compare(runs: Sequence[PastRun]) -> Comparison:
    """Compare the speed of a job's newest run with the median of earlier comparable runs.

    Args:
        runs: The runs of the job, oldest first.
    """
    reasons: Counter[str] = Counter()
    left = list(runs)
    while left and (reason := why_unfit(left[-1])) is not None:
        reasons[reason] += 1
        left.pop()
    if not left:
        return Comparison(None, left_out=dict(reasons))
    newest = left.pop()
    speeds: list[float] = []
    while left and len(speeds) < LAST_RUNS:
        run = left.pop()
        if (reason := why_incomparable(run, newest)) is None:
            speeds.append(_speed(run, newest))
        else:
            reasons[reason] += 1
    found = Comparison(newest.run_id, len(speeds), newest.total_tokens_per_s, left_out=dict(reasons))
    return found if len(speeds) < FEWEST_RUNS else _with_median(found, speeds)


def _with_median(found: Comparison, speeds: Sequence[float]) -> Comparison:
    middle = median(speeds)
    spread = (max(speeds) - min(speeds)) / middle
    return Comparison(found.run_id, found.before, found.tokens_per_s, middle, spread, found.left_out)


def trends(runs: Sequence[PastRun], limit: int) -> list[tuple[PastRun, float | None]]:
    """Return the newest runs of a job, oldest first, each with its relative change of speed.

    The change is None for a run that cannot be compared with earlier runs.

    Args:
        runs: All runs of the job, oldest first.
        limit: Maximum number of runs to return.
    """
    found = []
    for at in range(max(0, len(runs) - limit), len(runs)):
        change = None if why_unfit(runs[at]) else compare(runs[: at + 1]).change
        found.append((runs[at], change))
    return found


def comparison_lines(found: Comparison) -> Iterator[str]:
    """Yield lines for users that describe a comparison of speeds."""
    if found.run_id is None:
        yield (
            f"speeds are not compared: no finished run computed for {seconds(LEAST_S)} or longer; shorter runs "
            "are only used for forecasts"
        )
    elif found.change is None:
        yield (
            f"{found.run_id} is not compared: {found.before} comparable run{'' if found.before == 1 else 's'} "
            f"before it, and at least {FEWEST_RUNS} are needed"
        )
    else:
        yield (
            f"{found.run_id}: {short_number(found.tokens_per_s)} tok/s, {_changed(found.change)} the median of the "
            f"{found.before} comparable runs before it ({short_number(found.median_tokens_per_s)} tok/s; from slowest "
            f"to fastest they differ by {percent(found.spread)})"
        )
    if found.left_out:
        reasons = sorted(found.left_out.items(), key=lambda item: (-item[1], item[0]))
        yield "not compared: " + ", ".join(f"{count(number)} ({reason})" for reason, number in reasons)


def _changed(change: float) -> str:
    return f"{percent(abs(change))} {'slower' if change < 0 else 'faster'} than"


_HEAD = (
    "started (UTC)", "status", "rows", "computed", "tokens", "tok/s", "tok/s per TFLOP/s", "roofline", "wall",
    "engine", "forecast", "trend",
)  # fmt: skip


_MEASURED = ("labelled", "right", "normalised")
_CALIBRATED = ("calibration error", "Brier score")


def history_lines(found: Sequence[tuple[PastRun, float | None]]) -> list[str]:
    """Return a heading and one line per run for the command `history`.

    Columns with accuracy or calibration are added if any run has them.

    Args:
        found: The runs with their relative changes of speed, None for a run that is not compared.
    """
    table = [_HEAD, *(_cells(run, change) for run, change in found)]
    if any(run.accuracy is not None for run, _ in found):
        table = _with_columns(table, [_MEASURED, *(_measured(run) for run, _ in found)])
    if any(run.calibration_error is not None for run, _ in found):
        table = _with_columns(table, [_CALIBRATED, *(_calibrated(run) for run, _ in found)])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(_align(cells, widths)).rstrip() for cells in table]


def _with_columns(table: Sequence[tuple[str, ...]], more: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return [(*cells, *further) for cells, further in zip(table, more, strict=True)]


def _align(cells: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    # The first two cells are texts, and all others are numbers
    for at, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        yield cell.ljust(width) if at < 2 else cell.rjust(width)


def _cells(run: PastRun, change: float | None) -> tuple[str, ...]:
    started = UNKNOWN if run.started_at is None else f"{run.started_at:%Y-%m-%d %H:%M:%S}"
    status = run.exit_status or UNKNOWN
    return (
        started,
        f"{status} ({run.exit_code})" if run.exit_code else status,
        count(run.rows),
        count(run.computed_requests),
        short_number(run.tokens),
        short_number(run.total_tokens_per_s),
        short_number(run.tokens_per_tflop),
        percent(run.roofline_efficiency),
        seconds(run.wall_s),
        seconds(run.engine_s),
        seconds(run.forecast_s),
        UNKNOWN if change is None else f"{change:+.1%}",
    )


def _measured(run: PastRun) -> tuple[str, ...]:
    # One decimal, because accuracy hardly changes between incremental runs
    shares = (run.accuracy, run.normalised_accuracy)
    return count(run.labelled_rows), *(UNKNOWN if one is None else f"{one:.1%}" for one in shares)


def _calibrated(run: PastRun) -> tuple[str, ...]:
    return tuple(UNKNOWN if one is None else f"{one:.3f}" for one in (run.calibration_error, run.brier_score))
