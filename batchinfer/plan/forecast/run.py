"""Forecasts made during a run: at its start, from its first answers, and for its longest step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchinfer.core.errors import OutOfMemory
from batchinfer.core.wording import seconds
from batchinfer.engine.config import EngineInfo
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.plan.forecast.earlier_answers import earlier_answers
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

# No forecast is made if even the smallest simulation takes more than MOST_S seconds and TOO_MUCH times its budget
MOST_S, TOO_MUCH = 3.0, 3.0
# Finished answers, and share of the run's tokens, before a revised forecast. Earlier, the run has mostly prefilled.
FEWEST_ANSWERS, LEAST_SHARE = 64, 0.05
# Share of a CPU's peaks that steps reach if none were measured (`doctor --measure`). Covers plain operators without a
# compiler, and cores shared with other processes.
UNMEASURED_SHARE = 0.1
SLOWEST = Peaks(1e9, 1e9)  # FLOP/s and bytes/s of a slow core, for machines with unknown peaks


@dataclass(frozen=True, slots=True)
class RunForecast:
    """The forecast at the start of a run.

    Attributes:
        engine: The forecast of the engines. None if no forecast was made.
        lines: The forecast as lines for people. Empty, or the reason, if no forecast was made.
    """

    engine: EngineForecast | None = None
    lines: tuple[str, ...] = ()


def forecast_run(job: Job, setup: Setup, plan: Plan, prompts: Prompts, whole: bool = True) -> RunForecast:
    """Forecast the engines at the start of a run. An arithmetic error in the forecast does not stop the run.

    The forecast is empty if no request must run, if the machine's peaks are unknown, if memory is too small, or if even
    the smallest simulation takes too long.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan of the run.
        prompts: The token ids of all prompts.
        whole: True if the run computes nothing but this plan. The time of the whole run is then forecast too.
    """
    if setup.setting.peaks is None or not plan.to_run:
        return RunForecast()
    try:
        return _forecast(forecast_engine(job, setup, plan), prompts, whole)
    except OutOfMemory:  # only an estimate; the engine's process checks and reports it
        return RunForecast()
    except MemoryError:
        return RunForecast(None, ("no forecast: too little memory to simulate the job",))
    except (ArithmeticError, ValueError) as error:
        return RunForecast(None, (f"no forecast: {type(error).__name__}: {error}; please report it",))


def _forecast(engine: ForecastEngine, prompts: Prompts, whole: bool) -> RunForecast:
    budget_s = engine.run_budget_s()
    known = engine.answers_from > 0  # answers are simulated at their expected lengths
    if not known and engine.simulation_s(engine.every(budget_s)) > max(MOST_S, TOO_MUCH * budget_s):
        return RunForecast()
    found = engine.forecast(prompts, budget_s)
    lines = () if found.seconds is None else (f"forecast: {engine_text(found)}",)
    run = [f"the whole run: {line}" for line in range_line(found)] if whole else []
    drafts = [f"drafts: {line}" for line in drafts_line(found)]
    return RunForecast(found, (*lines, *run, *drafts))


def add_earlier_answers(
    forecast: RunForecast,
    setup: Setup,
    state: StateFolder,
    plan: Plan,
    prompts: Prompts,
    parts: Sequence[Path],
) -> RunForecast:
    """Return a forecast with a line about stored answers that an earlier version of the arithmetic made, if any.

    Args:
        forecast: The forecast of the plan.
        setup: The job's model, tokenizer and setting.
        state: The job's state folder.
        plan: The plan of the run.
        prompts: The token ids of all prompts.
        parts: Parquet files of the store.

    Raises:
        StorageError: The plan or the store cannot be read.
    """
    found = earlier_answers(setup, state, plan, prompts, parts, forecast.engine)
    return forecast if found is None else replace(forecast, lines=(*forecast.lines, found.text))


class RevisedForecast:
    """Reports a new forecast once during a run, from the lengths of the first answers and the rate of progress."""

    def __init__(
        self,
        wanted: bool,
        notice: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        """Create an object that has not reported a forecast yet.

        Args:
            wanted: Whether to report a new forecast. False: `look` does nothing.
            notice: Called with the new forecast as text.
            clock: Returns seconds.
            began: Start of the engine, by the clock. None: the first call of `look`.
        """
        self._wanted, self._notice, self._clock = wanted, notice, clock
        self._began = began
        self.facts: dict[str, Any] = {}  # for the run's report, by the names of the run table's columns

    def report_once(self, progress: Progress) -> None:
        """Report the new forecast as soon as enough answers have finished. Later calls do nothing.

        Args:
            progress: The run's progress: the output so far, the share that is done, and the time that is left.
        """
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
    """Return the predicted seconds of the largest step that the limits of an engine allow.

    Args:
        setting: The job's device, arithmetic, memory and parallelism.
        cost: FLOPs and bytes of the model's steps.
        longest: Tokens of each sequence in the step. Sequences share no blocks.
        info: Limits of the engine.
    """
    rows, tokens, layers = info.max_num_seqs, info.max_num_batched_tokens, len(cost.windows)
    attended = longest * layers
    shape = StepShape(tokens, min(rows, tokens), tokens * attended, rows * attended)
    times = step_times(setting, cost, None)
    time = StepTime(SLOWEST) if times.basis == "unknown" else times.time
    seconds = time.device_s(shape, cost, rows) + time.host_s(rows)
    return seconds / UNMEASURED_SHARE if times.basis == "limit" else seconds
