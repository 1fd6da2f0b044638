"""The forecast at the start of a run, which may fail or be left out without harm to the run."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.errors import OutOfMemory
from batchinfer.job import Job
from batchinfer.plan.forecast.engine import EngineForecast, ForecastEngine, forecast_engine
from batchinfer.plan.forecast.text import drafts_line, engine_text, range_line
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.requests import Prompts
from batchinfer.plan.setup.job_setup import Setup

# No forecast is made where its least part takes more than these seconds, and this many times its budget
MOST_S, TOO_MUCH = 3.0, 3.0


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
