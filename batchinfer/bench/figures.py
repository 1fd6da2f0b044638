"""Derive a run's MFU, MBU, roofline and plan efficiency, and where its time went, from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from batchinfer.bench.ideal import Ideal, ideal_costs
from batchinfer.bench.runs import Run
from batchinfer_kernels.cost import Cost, ModelCost, Peaks, step_total

MODEL = ("qkv", "o", "gate_up", "down", "lm_head", "attention")  # the operators whose FLOPs MFU counts


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of one run; shares and efficiencies are fractions, and rates are by the whole `wall_s`."""

    wall_s: float
    plan_s: float
    model_s: float  # inside the model and the sampler
    steps: int
    decode_step_s: float  # the median of the steps that decode most rows and nothing else
    rows_run: int
    prompt_tokens_run: int  # recomputation not counted
    decode_tokens_run: int
    recomputed_tokens: int
    preemptions: int
    mfu: float
    mbu: float
    roofline_efficiency: float
    plan_efficiency: float
    padding_share: float  # of all positions computed
    recomputed_share: float  # of all tokens run
    overhead_share: float  # of wall_s, outside the model
    roofline_s: float
    step_bound_s: float  # were a step's operators to overlap perfectly
    ideal_s: float


def operator_seconds(run: Run, model: ModelCost, peaks: Peaks) -> dict[str, float]:
    """Operator name → the sum of its bounds over the run's steps, recomputed tokens not counted."""
    total: dict[str, float] = {}
    for costs in _step_costs(run, model):
        for name, cost in costs.items():
            total[name] = total.get(name, 0.0) + cost.seconds(peaks)
    return total


def step_bound_seconds(run: Run, model: ModelCost, peaks: Peaks) -> float:
    """The bound of steps whose operators overlap perfectly: each as one operator."""
    return sum(step_total(costs).seconds(peaks) for costs in _step_costs(run, model))


def decode_step_seconds(run: Run) -> float:
    """The median of the steps that decode as many rows as any does, and nothing else; 0 where none decodes."""
    decoding = [step for step in run.steps if step.decode_tokens and not step.prefill_tokens]
    most = max((step.decode_tokens for step in decoding), default=0)
    full = [step.duration_s for step in decoding if step.decode_tokens == most]
    return statistics.median(full) if full else 0.0


def compute_seconds(run: Run, model: ModelCost, peaks: Peaks) -> float:
    """The time that the useful FLOPs of the model take at the peaks: MFU is this over the wall time.

    Where all is computed in one dtype that is FLOPs ÷ peak; int8 products count with the peak of int8.
    """
    return sum(_products(costs[name]).seconds(peaks) for costs in _step_costs(run, model) for name in MODEL)


def _step_costs(run: Run, model: ModelCost) -> Iterator[dict[str, Cost]]:
    """Yield the costs of the operators of each step, without recomputed tokens."""
    return (model.step(step) for step in run.shapes)


def _products(cost: Cost) -> Cost:
    """Return the part of a cost that MFU counts: products and sums, without quantising or moving anything."""
    return Cost(cost.coded_ops or cost.flops, 0, cost.coded_ops)


def run_figures(run: Run, ideal: Ideal, model: ModelCost, peaks: Peaks) -> RunFigures:
    """All figures of a run against the peaks."""
    prefill, decoded, recomputed, padded = (
        sum(getattr(sample, name) for sample in run.steps)
        for name in ("prefill_tokens", "decode_tokens", "recomputed_tokens", "padded_tokens")
    )
    ran = prefill + decoded
    model_s = sum(sample.model_s for sample in run.steps)
    roofline_s = sum(operator_seconds(run, model, peaks).values())
    ideal_s = sum(cost.seconds(peaks) for cost in ideal_costs(ideal, model).values())
    return RunFigures(
        wall_s=run.wall_s,
        plan_s=run.plan_s,
        model_s=model_s,
        steps=len(run.steps),
        decode_step_s=decode_step_seconds(run),
        rows_run=run.plan.to_run,
        prompt_tokens_run=prefill - recomputed,
        decode_tokens_run=decoded,
        recomputed_tokens=recomputed,
        preemptions=sum(sample.preemptions for sample in run.steps),
        mfu=compute_seconds(run, model, peaks) / run.wall_s,
        mbu=sum(sample.bytes for sample in run.steps) / (run.wall_s * peaks.bytes_per_s),
        roofline_efficiency=roofline_s / run.wall_s,
        plan_efficiency=ideal_s / run.wall_s,
        padding_share=padded / (ran + padded),
        recomputed_share=recomputed / ran,
        overhead_share=1 - model_s / run.wall_s,
        roofline_s=roofline_s,
        step_bound_s=step_bound_seconds(run, model, peaks),
        ideal_s=ideal_s,
    )


def medians(runs: Sequence[RunFigures]) -> dict[str, float]:
    """Return the median of each figure over the runs; counts stay whole where the runs agree."""
    columns = {name: [asdict(run)[name] for run in runs] for name in asdict(runs[0])}
    return {name: _median(values) for name, values in columns.items()}


def _median(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else statistics.median(values)
