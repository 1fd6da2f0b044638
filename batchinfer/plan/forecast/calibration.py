"""Forecasts the time of the int4 calibration at the start of a job's first run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batchinfer.core.wording import count, counted, rough_duration
from batchinfer.job import Job
from batchinfer.models.calibration.work import HELD_OUT_OF, STEP_TOKENS, CalibrationWork, calibration_work
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.spec.spec import INT4_GROUP
from batchinfer.plan.forecast.step_times import step_times
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting
from batchinfer.plan.setup.weights import ANSWER_TOKENS, LONGEST, MOST_TOKENS, ROWS_READ
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.cost import ModelCost, StepShape

# Efficiency of matrix products (relative to the float32 peak) and of factorisations (relative to half of it), measured
# on an Emerald Rapids core with 158 GFLOP/s: see docs/measurements/quantisation.md
PRODUCTS_EFFICIENCY, FACTORS_EFFICIENCY = 0.9, 0.6
# Cost per value in FLOPs at the peak of the same core; measured times are 22, 2.3, 34 and about 20 ns
SCALED_OPS, MADE_UP_OPS, SORTED_OPS, WEIGHT_OPS = 3500, 360, 5400, 3000
START_S = 4.0  # starting a process and importing its libraries

_UNMEASURED = "run `batchinfer doctor --measure` once on this machine"
_NO_GPU = "none has been timed on a GPU yet"


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """The size of the sample of prompts with which int4 weights are calibrated.

    Attributes:
        rows: Number of prompts.
        tokens: Number of tokens of all prompts together.
        answer_tokens: Maximum number of answer tokens per prompt.
    """

    rows: int
    tokens: int
    answer_tokens: int

    @property
    def length(self) -> int:
        """Return the mean number of prompt tokens per row of the sample plus the maximum number of answer tokens."""
        return self.tokens // max(1, self.rows) + self.answer_tokens

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of all rows of the sample, if every answer has the maximum length."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class CalibrationForecast:
    """The forecast of an int4 calibration.

    Attributes:
        rows: Number of prompts of the sample.
        tokens: Number of tokens of all these prompts together.
        seconds: Duration of the calibration. None if unknown.
        why: Why `seconds` is None, for people.
    """

    rows: int
    tokens: int
    seconds: float | None
    why: str | None = None

    @property
    def text(self) -> str:
        """Return the forecast of the calibration as a sentence."""
        sample = f"{counted(self.rows, 'row')} with {count(self.tokens)} tokens"
        if self.seconds is None:
            return f"once, on about {sample}, before the engine's time; how long it takes is not known: {self.why}"
        return f"about {rough_duration(self.seconds)}, once, on about {sample}, before the engine's time"


def forecast_job_calibration(
    job: Job, setup: Setup, plan: Plan, multiple: float = 1.0
) -> CalibrationForecast | None:
    """Forecast the calibration at the start of a job's first run.

    Returns None if the run does not calibrate: the job needs no calibration, the weights are calibrated already, or no
    request must run.

    Args:
        job: The job.
        setup: The job's model, tokenizer and setting.
        plan: The plan, which may cover only a sample of the job's rows.
        multiple: Rows of the job divided by rows of the plan. 1 if the plan covers all rows.
    """
    if not setup.setting.numerics.calibrates or setup.setting.parts.weights is not None or not plan.to_run:
        return None
    counts = [batch.numbers("token_count") for batch in plan.batches(65_536)]
    mean = max(1.0, float(np.minimum(np.concatenate(counts), LONGEST).mean()))
    rows = int(min(plan.to_run * multiple, ROWS_READ, max(1, MOST_TOKENS // mean)))
    answers = min(ANSWER_TOKENS, setup.setting.numerics.max_model_len) if job.task == "generate" else 0
    return calibration_forecast(setup, CalibrationSample(rows, round(rows * mean), answers))


def calibration_forecast(
    setup: Setup, sample: CalibrationSample, group: int = INT4_GROUP
) -> CalibrationForecast:
    """Forecast the time to calibrate the int4 weights of a job's model.

    It is unknown on GPUs and without measured peaks.

    Args:
        setup: The job's model, tokenizer and setting.
        sample: The size of the sample of prompts.
        group: Number of weights that share a scale.
    """
    setting, checkpoint = setup.setting.with_placement(replicas=1), setup.checkpoint
    assert isinstance(checkpoint, Checkpoint), "no other model is calibrated"
    peak = setting.placement.hardware.peak_flops.get("float32")
    if setting.device != "cpu":
        return CalibrationForecast(sample.rows, sample.tokens, None, _NO_GPU)
    if peak is None or setting.peaks is None:
        return CalibrationForecast(sample.rows, sample.tokens, None, _UNMEASURED)
    searched = sample.total_tokens * (HELD_OUT_OF - 1) // HELD_OUT_OF
    work = calibration_work(checkpoint, searched, group)
    if sample.answer_tokens:  # answers come from a model that is quantised while it is loaded
        work += CalibrationWork(scaled=work.weights)
    spent = START_S + work_seconds(work, peak) + _answering_s(setting, checkpoint, sample)
    spent += sum(_passing_s(setting, checkpoint, sample, codes) for codes in ("none", "int4"))
    return CalibrationForecast(sample.rows, sample.tokens, spent)


def quality_forecast_s(setup: Setup, sample: CalibrationSample) -> float | None:
    """Return the seconds of measuring the quality of the job's quantised model on a sample, or None if unknown.

    The time to load the layers is not included.
    """
    setting, checkpoint = setup.setting.with_placement(replicas=1), setup.checkpoint
    if not isinstance(checkpoint, Checkpoint) or setting.device != "cpu" or setting.peaks is None:
        return None
    codes: tuple[Quantization, ...] = ("none", setting.numerics.quantization)
    return sum(_passing_s(setting, checkpoint, sample, each) for each in codes)


def work_seconds(work: CalibrationWork, flops_per_s: float) -> float:
    """Return the seconds of a calibration's own arithmetic, without the forward passes of the model.

    Args:
        work: The numbers of operations of each kind.
        flops_per_s: Peak FLOP/s of float32 matrix products.
    """
    at_peak = work.products / PRODUCTS_EFFICIENCY + 2 * work.factors / FACTORS_EFFICIENCY
    at_peak += work.scaled * SCALED_OPS + work.made_up * MADE_UP_OPS
    at_peak += work.sorted * SORTED_OPS + work.weights * WEIGHT_OPS
    return at_peak / flops_per_s


def _engine(setting: Setting, checkpoint: Checkpoint, codes: Quantization) -> tuple[ModelCost, StepTime]:
    setting = setting.with_numerics(quantization=codes)
    cost = setting.model_cost(checkpoint.for_quantization(codes))
    return cost, step_times(setting, cost, None).time


def _passing_s(
    setting: Setting, checkpoint: Checkpoint, sample: CalibrationSample, codes: Quantization
) -> float:
    cost, time = _engine(setting, checkpoint, codes)
    rows = max(1, min(sample.rows, STEP_TOKENS // max(1, sample.length)))
    asked = rows * sample.answer_tokens // HELD_OUT_OF
    step = StepShape(
        rows * sample.length, asked, rows * cost.pairs(sample.length), rows * cost.seen(sample.length)
    )
    return time.device_s(step, cost, rows) * sample.rows / rows


def _answering_s(setting: Setting, checkpoint: Checkpoint, sample: CalibrationSample) -> float:
    if not sample.answer_tokens:
        return 0.0
    cost, time = _engine(setting, checkpoint, "int4")
    rows, prompt = sample.rows, sample.length - sample.answer_tokens
    half = prompt + sample.answer_tokens // 2
    reads = StepShape(rows * prompt, rows, rows * cost.pairs(prompt), rows * cost.seen(prompt))
    writes = StepShape(rows, rows, rows * cost.seen(half), rows * cost.seen(half))
    steps = ((reads, 1), (writes, sample.answer_tokens - 1))
    return sum(times * (time.device_s(step, cost, rows) + time.host_s(rows)) for step, times in steps)
