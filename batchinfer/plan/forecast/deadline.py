"""Forecasts how much of a job is done by its deadline, or by the time at which its run stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from batchinfer.core.wording import about, count, percent
from batchinfer.job import Job
from batchinfer.job.deadline import next_moment
from batchinfer.plan.forecast.calibration import CalibrationForecast
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.order.plan import Plan

Clock = Callable[[], datetime]

# The time left is estimated from the recent rate. Early in a run, that rate covers mostly prefill and is misleading.
FIRST_LOOK_S = 30.0
_ROWS_READ = 65_536  # requests per batch


def now() -> datetime:
    """Return the current local time."""
    return datetime.now().astimezone()


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time by which results are needed, compared with the forecast engine time."""

    at: datetime
    left_s: float  # from now to the deadline
    engine_s: float | None  # forecast time of the engines and a calibration; None if unknown
    upper_bound: bool = False  # answers may be shorter than forecast
    uncounted: bool = False  # engine_s omits a calibration of unknown length

    @classmethod
    def of(
        cls,
        job: Job,
        started: datetime,
        forecast: EngineForecast | None,
        clock: Clock = now,
        first: EngineForecast | None = None,
        calibration: CalibrationForecast | None = None,
    ) -> Deadline | None:
        """Return the first deadline after the start of the run, which may already be past, or None without one.

        Args:
            job: The job.
            started: Start of the run.
            forecast: Forecast of the engine. None if unknown.
            clock: Returns the current time.
            first: Forecast of a draft model that answers all rows before the engine starts. None without one.
            calibration: Forecast of the calibration that precedes both. None without one.
        """
        if job.deadline is None:
            return None
        at = next_moment(job.deadline, started)
        left_s = (at - clock()).total_seconds()
        each = [forecast] if first is None else [first, forecast]
        takes = [one.seconds for one in each if one is not None and one.seconds is not None]
        if len(takes) < len(each):
            return cls(at, left_s, None)
        bound = any(one is not None and one.upper_bound for one in each)
        if calibration is None:
            return cls(at, left_s, sum(takes), bound)
        return cls(at, left_s, sum(takes) + (calibration.seconds or 0.0), bound, calibration.seconds is None)

    @property
    def spare_s(self) -> float | None:
        """Return the seconds between the forecast end and the deadline, negative if late, or None if unknown."""
        return None if self.engine_s is None else self.left_s - self.engine_s

    @property
    def text(self) -> str:
        """Return the deadline and whether it will be met, as a sentence."""
        uncounted = "; how long the calibration before it takes is not known, and not counted"
        return self._text + (uncounted if self.uncounted and self.spare_s is not None else "")

    @property
    def _text(self) -> str:
        when = f"{self.at:%Y-%m-%d %H:%M}"
        when += f", in {about(self.left_s)}" if self.left_s > 0 else f", {about(-self.left_s)} ago"
        if self.spare_s is None:
            return (
                f"{when}: unknown whether it will be met, because there is no forecast of the engine's time"
            )
        least = "at least " if self.upper_bound else ""
        if self.spare_s >= 0:
            return f"{when}: the engine is forecast to finish {least}{about(self.spare_s)} before it"
        late = f"the engine is forecast to finish {about(-self.spare_s)} after it"
        if not self.upper_bound:
            return f"{when}: {late}"
        return (
            f"{when}: {late} if every answer has max_tokens tokens; the run makes a new forecast from its first "
            "answers"
        )

    @property
    def is_missed(self) -> bool:
        """Return True if the deadline will be missed. An upper bound on the time is not enough."""
        return self.spare_s is not None and self.spare_s < 0 and not self.upper_bound


class DeadlineWatch:
    """Counts answers until the deadline, and warns once if the deadline will be missed."""

    def __init__(self, deadline: Deadline, notice: Callable[[str], None], clock: Clock = now) -> None:
        self._at, self._notice, self._clock = deadline.at, notice, clock
        self._began = clock()
        self._told = deadline.is_missed  # the forecast has warned already
        self.rows = self.output_tokens = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Return the columns of the run table that describe the deadline."""
        return {
            "deadline": self._at,
            "deadline_rows": self.rows,
            "deadline_output_tokens": self.output_tokens,
        }

    def forecast(self, deadline: Deadline) -> None:
        """Suppress the warning if a forecast made during the run already reports a missed deadline."""
        self._told |= deadline.is_missed

    def answered(self, rows: int, output_tokens: int) -> None:
        """Count an answer that serves `rows` rows, unless the deadline is past."""
        if self._clock() <= self._at:
            self.rows += rows
            self.output_tokens += output_tokens

    def look(self, left_s: float | None) -> None:
        """Warn once if the deadline will be missed.

        `left_s` is the remaining engine time at the current rate in seconds, or None if unknown.
        """
        if self._told:
            return
        moment = self._clock()
        late_s = (moment - self._at).total_seconds() + (left_s or 0.0)
        known = left_s is not None and (moment - self._began).total_seconds() >= FIRST_LOOK_S
        if late_s > 0 and (known or moment > self._at):
            self._told = True
            self._notice(
                f"the deadline ({self._at:%Y-%m-%d %H:%M}) will be missed by about {about(late_s)} at the present "
                "rate; finished answers are kept, and the same command continues from them"
            )


@dataclass(frozen=True, slots=True)
class StopForecast:
    """Forecasts how many rows are done when a run that starts now is stopped.

    The forecast assumes a steady rate of tokens in plan order.
    """

    at: datetime
    left_s: float  # from now to `at`
    takes_s: float | None  # for all rows; None if unknown
    rows: int  # all rows of the job, error rows included
    rows_done: int | None  # rows done at `at`; None if unknown
    upper_bound: bool = False  # takes_s is an upper bound

    @classmethod
    def of(
        cls,
        at: datetime,
        now: datetime,
        plan: Plan,
        before_s: float,
        engine_s: float | None,
        upper_bound: bool,
    ) -> StopForecast:
        """Return the forecast for a plan with rows to run.

        Args:
            at: When the run stops.
            now: When the run starts.
            plan: The plan of all requests.
            before_s: Seconds until the engines start.
            engine_s: Engine seconds for the whole plan. None if unknown.
            upper_bound: Whether `engine_s` is an upper bound.
        """
        left_s = (at - now).total_seconds()
        if engine_s is None:
            return cls(at, left_s, None, plan.rows, None)
        share = (left_s - before_s) / engine_s if engine_s else 1.0
        done = plan.rows - plan.rows_to_run + _rows_within(plan, min(1.0, max(0.0, share)))
        return cls(at, left_s, before_s + engine_s, plan.rows, done, upper_bound)

    def scaled(self, rows: int) -> StopForecast:
        """Return the forecast for a job of `rows` rows, of which this forecast covers a sample."""
        done = None if self.rows_done is None else round(self.rows_done * rows / max(1, self.rows))
        return StopForecast(self.at, self.left_s, self.takes_s, rows, done, self.upper_bound)

    @property
    def share(self) -> float | None:
        """Return the share of the rows done by then (0 to 1), or None if unknown."""
        return None if self.rows_done is None else self.rows_done / max(1, self.rows)

    @property
    def text(self) -> str:
        """Return the forecast as a sentence."""
        when = f"{self.at.astimezone():%Y-%m-%d %H:%M}, in {about(self.left_s)}"
        if self.takes_s is None or self.share is None:
            return f"{when}: how many rows will be done by then is not known without a forecast of the engine's time"
        least = "at least " if self.upper_bound else ""
        if self.takes_s <= self.left_s:
            return f"{when}: all rows will be done, {least}{about(self.left_s - self.takes_s)} before"
        done = f"{percent(self.share)} of the rows ({count(self.rows_done)} of {count(self.rows)})"
        most = "at most " if self.upper_bound else "about "
        return f"{when}: {least}{done} will be done by then, and {most}{about(self.takes_s - self.left_s)} are left"

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON object."""
        takes_s = self.takes_s
        return {
            "at": self.at.isoformat(),
            "share": self.share,
            "rows_done": self.rows_done,
            "left_s": None if takes_s is None else max(0.0, takes_s - self.left_s),
        }


def _rows_within(plan: Plan, share: float) -> int:
    """Return the number of rows served by the first requests of a plan that hold this share of its tokens."""
    if share >= 1:
        return plan.rows_to_run
    most, rows, tokens = share * (plan.prompt_tokens + plan.expected_tokens), 0, 0
    for batch in plan.batches(_ROWS_READ):
        ends = tokens + np.cumsum(
            batch.numbers("token_count") + batch.numbers("expected_tokens").astype(np.int64)
        )
        rows += int(batch.numbers("users")[ends <= most].sum())
        tokens = int(ends[-1])
        if tokens > most:
            break
    return rows
