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

# The time left is taken from the rate of the last seconds, which says little at first: a run begins by reading prompts.
FIRST_LOOK_S = 30.0
_ROWS_READ = 65_536  # requests at a time


def now() -> datetime:
    return datetime.now().astimezone()


@dataclass(frozen=True, slots=True)
class Deadline:
    """The moment at which the results are wanted, and what the engine leaves of the time until then."""

    at: datetime
    left_s: float  # from now on
    engine_s: float | None  # what the engine is forecast to take; None: not known
    upper_bound: bool = False  # the engine may take less: the forecast does not know how long answers become
    uncounted: bool = False  # a calibration comes first that takes nobody knows how long

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
        """The first one after a run `started`, which may be past by now; None: the job has none. `first`: of the draft
        model that answers before the engine begins, if there is one; `calibration`: what comes before all else, if
        it does."""
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
        """The seconds to spare are negative where the deadline will be missed, and None where that is not known."""
        return None if self.engine_s is None else self.left_s - self.engine_s

    @property
    def text(self) -> str:
        """Say, for people, when the deadline is, and whether it will be met."""
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
            f"{when}: {late} if every answer becomes as long as its max_tokens; the run forecasts anew from its first "
            "answers"
        )

    @property
    def is_missed(self) -> bool:
        """Whether the forecast says for sure that it will be missed."""
        return self.spare_s is not None and self.spare_s < 0 and not self.upper_bound


class DeadlineWatch:
    """The watch counts the answers until the deadline, and says once that it will not be met."""

    def __init__(self, deadline: Deadline, notice: Callable[[str], None], clock: Clock = now) -> None:
        self._at, self._notice, self._clock = deadline.at, notice, clock
        self._began = clock()
        self._told = deadline.is_missed  # the forecast has said so already
        self.rows = self.output_tokens = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Return what the run's report has of the deadline, by the names of the run table's columns."""
        return {
            "deadline": self._at,
            "deadline_rows": self.rows,
            "deadline_output_tokens": self.output_tokens,
        }

    def forecast(self, deadline: Deadline) -> None:
        """Take note of what the forecast says, which came during the run."""
        self._told |= deadline.is_missed

    def answered(self, rows: int, output_tokens: int) -> None:
        """Count an answer of `output_tokens` tokens that serves `rows` rows."""
        if self._clock() <= self._at:
            self.rows += rows
            self.output_tokens += output_tokens

    def look(self, left_s: float | None) -> None:
        """Say once that the deadline will be missed, if it will. `left_s`: seconds that the engine still takes, at its
        present rate; None: not known."""
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
    """Forecasts how much a run that begins now has done by the time at which it stops.

    The engines are taken to run tokens at a steady rate, in the order of the plan.
    """

    at: datetime
    left_s: float  # until then
    takes_s: float | None  # until all rows have answers; None: not known
    rows: int  # of the job, error rows included
    rows_done: int | None  # of these, by then; None: not known
    upper_bound: bool = False  # the engines may take less

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
            before_s: seconds that pass before the engines run.
            engine_s: seconds that the engines take for the whole plan, or None if that is not known.
            upper_bound: whether they may take less.
        """
        left_s = (at - now).total_seconds()
        if engine_s is None:
            return cls(at, left_s, None, plan.rows, None)
        share = (left_s - before_s) / engine_s if engine_s else 1.0
        done = plan.rows - plan.rows_to_run + _rows_within(plan, min(1.0, max(0.0, share)))
        return cls(at, left_s, before_s + engine_s, plan.rows, done, upper_bound)

    def scaled(self, rows: int) -> StopForecast:
        """Return the forecast for a job of `rows` rows. This forecast's rows are a sample of them."""
        done = None if self.rows_done is None else round(self.rows_done * rows / max(1, self.rows))
        return StopForecast(self.at, self.left_s, self.takes_s, rows, done, self.upper_bound)

    @property
    def share(self) -> float | None:
        """Return the share of the rows that are done by then, 0 … 1."""
        return None if self.rows_done is None else self.rows_done / max(1, self.rows)

    @property
    def text(self) -> str:
        """Return the forecast for people."""
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
        """Return the forecast for programs."""
        takes_s = self.takes_s
        return {
            "at": self.at.isoformat(),
            "share": self.share,
            "rows_done": self.rows_done,
            "left_s": None if takes_s is None else max(0.0, takes_s - self.left_s),
        }


def _rows_within(plan: Plan, share: float) -> int:
    """Return how many rows the first requests of a plan serve that have this share of its tokens."""
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
