"""Forecasts how much of a job is done by its deadline, or by the time at which its run stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from batchinfer.core.wording import count, percent, rough_duration
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
    """The deadline of a job, compared with the forecast engine time of its run.

    Attributes:
        at: The deadline.
        left_s: Seconds from now to the deadline. Negative if it is past.
        engine_s: Forecast seconds of the engines, including a draft model and a calibration that run before. None if
            unknown.
        upper_bound: Whether `engine_s` assumes that every answer has max_tokens.
        uncounted: Whether `engine_s` lacks a calibration of unknown duration.
    """

    at: datetime
    left_s: float
    engine_s: float | None
    upper_bound: bool = False
    uncounted: bool = False

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
        """Compare the job's first deadline after the start of the run with the forecast.

        Returns None if the job has no deadline. The deadline may be past now. `Deadline.engine_s` is the sum of the
        times of all given forecasts.

        Args:
            job: The job.
            started: Start of the run.
            forecast: Forecast of the engine. None if unknown.
            clock: Returns the current time.
            first: Forecast of a draft model that answers all rows before the engine starts. None without one.
            calibration: Forecast of the calibration that runs before the draft model and the engine. None without one.
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
        """Return the seconds between the forecast end of the engines and the deadline.

        Negative if the engines end after the deadline. None if their time is unknown.
        """
        return None if self.engine_s is None else self.left_s - self.engine_s

    @property
    def text(self) -> str:
        """Return a sentence that says when the deadline is and whether it will be met."""
        uncounted = "; how long the calibration before it takes is not known, and not counted"
        return self._text + (uncounted if self.uncounted and self.spare_s is not None else "")

    @property
    def _text(self) -> str:
        when = f"{self.at:%Y-%m-%d %H:%M}"
        when += (
            f", in {rough_duration(self.left_s)}"
            if self.left_s > 0
            else f", {rough_duration(-self.left_s)} ago"
        )
        if self.spare_s is None:
            return (
                f"{when}: unknown whether it will be met, because there is no forecast of the engine's time"
            )
        least = "at least " if self.upper_bound else ""
        if self.spare_s >= 0:
            return f"{when}: the engine is forecast to finish {least}{rough_duration(self.spare_s)} before it"
        late = f"the engine is forecast to finish {rough_duration(-self.spare_s)} after it"
        if not self.upper_bound:
            return f"{when}: {late}"
        return (
            f"{when}: {late} if every answer has max_tokens tokens; the run makes a new forecast from its first "
            "answers"
        )

    @property
    def is_missed(self) -> bool:
        """Return True if the forecast says that the deadline will be missed.

        False if the forecast is only an upper bound on the time, or if the time is unknown.
        """
        return self.spare_s is not None and self.spare_s < 0 and not self.upper_bound


class DeadlineWatch:
    """Counts the rows that a run finishes before its deadline, and warns once if it will miss the deadline."""

    def __init__(self, deadline: Deadline, notice: Callable[[str], None], clock: Clock = now) -> None:
        self._at, self._notice, self._clock = deadline.at, notice, clock
        self._began = clock()
        self._told = deadline.is_missed  # the forecast has warned already
        self.rows = self.output_tokens = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Return columns for the run's report: the deadline, and the rows and output tokens done before it."""
        return {
            "deadline": self._at,
            "deadline_rows": self.rows,
            "deadline_output_tokens": self.output_tokens,
        }

    def forecast(self, deadline: Deadline) -> None:
        """Record a forecast that was shown to the user during the run.

        If it says that the deadline will be missed, `look` gives no warning, because the user knows already.
        """
        self._told |= deadline.is_missed

    def answered(self, rows: int, output_tokens: int) -> None:
        """Count the rows and tokens of an answer that has just arrived, unless the deadline is past.

        Args:
            rows: Number of rows with this answer: a row and its duplicates.
            output_tokens: Tokens of the answer.
        """
        if self._clock() <= self._at:
            self.rows += rows
            self.output_tokens += output_tokens

    def warn_if_late(self, left_s: float | None) -> None:
        """Warn if the deadline will be missed, unless a warning was given before.

        In the first 30 seconds of a run it warns only if the deadline is past, because the rate is not representative
        yet.

        Args:
            left_s: Remaining engine time at the current rate, in seconds. None if unknown.
        """
        if self._told:
            return
        moment = self._clock()
        late_s = (moment - self._at).total_seconds() + (left_s or 0.0)
        known = left_s is not None and (moment - self._began).total_seconds() >= FIRST_LOOK_S
        if late_s > 0 and (known or moment > self._at):
            self._told = True
            self._notice(
                f"the deadline ({self._at:%Y-%m-%d %H:%M}) will be missed by about {rough_duration(late_s)} at the "
                "present rate; finished answers are kept, and the same command continues from them"
            )


@dataclass(frozen=True, slots=True)
class StopForecast:
    """The number of rows that are done when a run is stopped at a given time.

    The engines are assumed to run requests in the order of the plan, with a constant number of tokens per second.

    Attributes:
        at: When the run stops.
        left_s: Seconds from the start of the run to `at`.
        takes_s: Seconds for all rows of the job. None if unknown.
        rows: Rows of the job, error rows included.
        rows_done: Rows that are done at `at`. None if unknown.
        upper_bound: Whether `takes_s` is an upper bound, because answers may be shorter than assumed.
    """

    at: datetime
    left_s: float
    takes_s: float | None
    rows: int
    rows_done: int | None
    upper_bound: bool = False

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
        """Forecast how many rows a run completes before it stops. The plan must have requests to run.

        Args:
            at: When the run stops.
            now: When the run starts.
            plan: The plan of all requests.
            before_s: Seconds from the start of the run to the start of the engines.
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
        """Return the forecast scaled from a sample to a job of `rows` rows."""
        done = None if self.rows_done is None else round(self.rows_done * rows / max(1, self.rows))
        return StopForecast(self.at, self.left_s, self.takes_s, rows, done, self.upper_bound)

    @property
    def share(self) -> float | None:
        """Return the share of the job's rows that are done when the run stops (0 to 1), or None if unknown."""
        return None if self.rows_done is None else self.rows_done / max(1, self.rows)

    @property
    def text(self) -> str:
        """Return a sentence that says how many rows are done when the run stops."""
        when = f"{self.at.astimezone():%Y-%m-%d %H:%M}, in {rough_duration(self.left_s)}"
        if self.takes_s is None or self.share is None:
            return f"{when}: how many rows will be done by then is not known without a forecast of the engine's time"
        least = "at least " if self.upper_bound else ""
        if self.takes_s <= self.left_s:
            return (
                f"{when}: all rows will be done, {least}{rough_duration(self.left_s - self.takes_s)} before"
            )
        done = f"{percent(self.share)} of the rows ({count(self.rows_done)} of {count(self.rows)})"
        most = "at most " if self.upper_bound else "about "
        left = rough_duration(self.takes_s - self.left_s)
        return f"{when}: {least}{done} will be done by then, and {most}{left} are left"

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as a JSON object.

        Its keys: `at` (stop time), `share` (of the rows, 0 to 1), `rows_done`, and `left_s` (seconds of work that
        remain after the stop).
        """
        takes_s = self.takes_s
        return {
            "at": self.at.isoformat(),
            "share": self.share,
            "rows_done": self.rows_done,
            "left_s": None if takes_s is None else max(0.0, takes_s - self.left_s),
        }


def _rows_within(plan: Plan, share: float) -> int:
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
