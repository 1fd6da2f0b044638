"""The forecast at the start of a run, which may fail or be left out without harm to the run."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.core.errors import OutOfMemory
from batchinfer.job import Job
from batchinfer.plan.forecast.engine import EngineForecast, ForecastEngine, forecast_engine
from batchinfer.plan.forecast.order_choice import settle_order, settled_forecast, simulation_s
from batchinfer.plan.forecast.text import drafts_line, engine_text, order_line
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


def forecast_run(job: Job, setup: Setup, plan: Plan, prompts: Prompts, settles: bool = True) -> RunForecast:
    """Settle the order, if the plan may have another one (`settles`), and forecast the engine. A defect of the
    forecast's arithmetic costs the forecast alone.

    There is none where nothing would come of it: nothing is to run, the machine's peaks are not known, or the engine
    will find too little memory; and where even the least part that tells anything would take long to simulate, as
    answers of very many tokens do.
    """
    if setup.setting.peaks is None or not plan.to_run:
        return RunForecast()
    try:
        return _forecast(forecast_engine(job, setup, plan), prompts, settles)
    except OutOfMemory:  # estimated from here; the engine's own process knows better, and says so
        return RunForecast()
    except MemoryError:
        return RunForecast(None, ("no forecast: too little memory to simulate the job",))
    except (ArithmeticError, ValueError) as error:
        return RunForecast(None, (f"no forecast: {type(error).__name__}: {error}; please report it",))


def _forecast(engine: ForecastEngine, prompts: Prompts, settles: bool) -> RunForecast:
    budget_s = engine.run_budget_s()
    known = engine.answers_from > 0  # then answers are simulated as long as they become, not as they may
    if not known and simulation_s(engine, engine.every(budget_s)) > max(MOST_S, TOO_MUCH * budget_s):
        return RunForecast(None, order_line(settle_order(engine, prompts)) if settles else ())
    found = settled_forecast(engine, prompts, budget_s) if settles else engine.forecast(prompts, budget_s)
    lines = () if found.seconds is None else (f"forecast: {engine_text(found)}",)
    drafts = [f"drafts: {line}" for line in drafts_line(found)]
    return RunForecast(found, (*lines, *drafts, *order_line(found.order)))
