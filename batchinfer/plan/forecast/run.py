"""Forecasts that a run makes of itself: at its start, during it, and of the longest step of an engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.wording import seconds
from batchinfer.engine.config import EngineInfo
from batchinfer.job import Job
from batchinfer.plan.forecast.engine import EngineForecast, ForecastEngine, forecast_engine
from batchinfer.plan.forecast.step_times import step_times
from batchinfer.plan.forecast.text import drafts_line, engine_text, range_line
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer.report.progress import Progress
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape

# No forecast is made where its least part takes more than these seconds, and this many times its budget
MOST_S, TOO_MUCH = 3.0, 3.0
# Answers that ended by themselves, and the share of the run's tokens: before that the run has mostly read prompts
FEWEST_ANSWERS, LEAST_SHARE = 64, 0.05
# What steps may reach of a CPU's peaks while none were measured (`doctor --measure`): plain operators, without a
# compiler, and cores that others use.
UNMEASURED_SHARE = 0.1
SLOWEST = Peaks(1e9, 1e9)  # of a machine of which nothing is known: FLOP/s and bytes a second of a slow core


@dataclass(frozen=True, slots=True)
class RunForecast:
    """A run's forecast, made before it starts. `engine`: None where no forecast was made."""

    engine: EngineForecast | None = None
    lines: tuple[str, ...] = ()  # for people


def forecast_run(job: Job, setup: Setup, plan: Plan, prompts: Prompts, whole: bool = True) -> RunForecast:
    """Forecast the engine at the start of a run. An error in the forecast's arithmetic never stops the run.

    `whole`: the plan is all that the run computes, and the time of the whole run is forecast, too.

    The forecast is empty if nothing has to run, if the machine's peaks are unknown, or if the engine will have too
    little memory. It is also empty if even the smallest sample would take long to simulate, for example because answers
    may have tens of thousands of tokens.
    """
    if setup.setting.peaks is None or not plan.to_run:
        return RunForecast()
    try:
        return _forecast(forecast_engine(job, setup, plan), prompts, whole)
    except OutOfMemory:  # estimated from here; the engine's own process knows better, and says so
        return RunForecast()
    except MemoryError:
        return RunForecast(None, ("no forecast: too little memory to simulate the job",))
    except (ArithmeticError, ValueError) as error:
        return RunForecast(None, (f"no forecast: {type(error).__name__}: {error}; please report it",))


def _forecast(engine: ForecastEngine, prompts: Prompts, whole: bool) -> RunForecast:
    budget_s = engine.run_budget_s()
    known = engine.answers_from > 0  # then answers are simulated as long as they become, not as they may
    if not known and engine.simulation_s(engine.every(budget_s)) > max(MOST_S, TOO_MUCH * budget_s):
        return RunForecast()
    found = engine.forecast(prompts, budget_s)
    lines = () if found.seconds is None else (f"forecast: {engine_text(found)}",)
    run = [f"the whole run: {line}" for line in range_line(found)] if whole else []
    drafts = [f"drafts: {line}" for line in drafts_line(found)]
    return RunForecast(found, (*lines, *run, *drafts))


class RevisedForecast:
    """Says once how long the engine will take, judged by the lengths of the first answers and the rate so far."""

    def __init__(
        self,
        wanted: bool,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """`wanted`: the forecast before the run counted every answer at its max_tokens, or there was none. `began`:
        when the engine's time began, by the clock; None: with the first look."""
        self._wanted, self._notice, self._clock = wanted, notice, clock
        self._began = began
        self.facts: dict[str, Any] = {}  # for the run's report, by the names of the run table's columns

    def look(self, progress: Progress) -> None:
        """Say it as soon as enough answers are there."""
        output = progress.output
        if not self._wanted or output is None:
            return
        began = self._began = self._clock() if self._began is None else self._began
        if output.ended < FEWEST_ANSWERS:
            return
        share, left_s = progress.share, progress.left_s()
        if share is None or left_s is None or share < LEAST_SHARE:
            return
        self._wanted, whole_s = False, self._clock() - began + left_s
        self.facts = {"forecast_revised_s": whole_s}
        tokens = f", for about {output.total:,} output tokens" if output.total else ""
        self._notice(
            f"forecast from the first {output.ended:,} answers: the engine will take about {seconds(whole_s)} in all"
            f"{tokens}"
        )


def longest_step_s(setting: Setting, cost: ModelCost, longest: int, info: EngineInfo) -> float:
    """Return the seconds of the largest step that the engine's limits allow, in which all sequences are as long as the
    `longest` and share nothing."""
    rows, tokens, layers = info.max_num_seqs, info.max_num_batched_tokens, len(cost.windows)
    attended = longest * layers
    shape = StepShape(tokens, min(rows, tokens), tokens * attended, rows * attended)
    times = step_times(setting, cost, None)
    time = StepTime(SLOWEST) if times.known == "unknown" else times.time
    seconds = time.device_s(shape, cost, rows) + time.host_s(rows)
    return seconds / UNMEASURED_SHARE if times.known == "limit" else seconds
