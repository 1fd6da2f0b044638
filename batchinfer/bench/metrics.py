"""Computes MFU, MBU, roofline efficiency, plan efficiency and the shares of time of a run from its samples."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from batchinfer.bench.ideal import Ideal, ideal_costs
from batchinfer.bench.runs import Run
from batchinfer_kernels.cost import Cost, ModelCost, Peaks, step_total

MODEL = ("qkv", "o", "gate_up", "down", "lm_head", "attention")  # the operators whose FLOPs MFU counts


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """The metrics of one timed run of a workload. Times are in seconds, shares and efficiencies are fractions.

    Attributes:
        wall_s: Wall time, planning included.
        plan_s: Time of planning.
        model_s: Time in the model and the sampler.
        steps: Number of engine steps.
        decode_step_s: Median duration of the largest decode steps; see `decode_step_seconds`.
        rows_run: Number of rows that were computed.
        prompt_tokens_run: Number of prompt tokens that were computed, without recomputed tokens.
        decode_tokens_run: Number of generated tokens that were computed.
        recomputed_tokens: Number of tokens that were computed again after preemptions.
        preemptions: Number of preemptions.
        mfu: `compute_seconds` as a fraction of the wall time.
        mbu: Bytes moved, as a fraction of the peak bandwidth × wall time.
        roofline_efficiency: `roofline_s` as a fraction of the wall time.
        plan_efficiency: `ideal_s` as a fraction of the wall time.
        padding_share: Positions that were computed only as padding, as a fraction of all computed positions.
        recomputed_share: Recomputed tokens, as a fraction of all tokens computed.
        overhead_share: Time outside of the model, as a fraction of the wall time.
        roofline_s: Sum of the roofline times of all operators in all steps.
        step_bound_s: Roofline time if the operators of a step overlapped; see `step_bound_seconds`.
        ideal_s: Roofline time of the ideal job, in which shared prefixes and duplicates are computed once.
    """

    wall_s: float
    plan_s: float
    model_s: float
    steps: int
    decode_step_s: float
    rows_run: int
    prompt_tokens_run: int
    decode_tokens_run: int
    recomputed_tokens: int
    preemptions: int
    mfu: float
    mbu: float
    roofline_efficiency: float
    plan_efficiency: float
    padding_share: float
    recomputed_share: float
    overhead_share: float
    roofline_s: float
    step_bound_s: float
    ideal_s: float


def operator_seconds(run: Run, model: ModelCost, peaks: Peaks) -> dict[str, float]:
    """Return the roofline time of each operator over all steps of a run, in seconds by name.

    Recomputed tokens are not counted.
    """
    total: dict[str, float] = {}
    for costs in _step_costs(run, model):
        for name, cost in costs.items():
            total[name] = total.get(name, 0.0) + cost.seconds(peaks)
    return total


def step_bound_seconds(run: Run, model: ModelCost, peaks: Peaks) -> float:
    """Return the roofline time of the run, in seconds, if the operators of each step overlapped perfectly."""
    return sum(step_total(costs).seconds(peaks) for costs in _step_costs(run, model))


def decode_step_seconds(run: Run) -> float:
    """Return the median duration of the decode steps with the largest batch, in seconds; 0 if there are none.

    Steps that also prefill prompts are not considered.
    """
    decoding = [step for step in run.steps if step.decode_tokens and not step.prefill_tokens]
    most = max((step.decode_tokens for step in decoding), default=0)
    full = [step.duration_s for step in decoding if step.decode_tokens == most]
    return statistics.median(full) if full else 0.0


def compute_seconds(run: Run, model: ModelCost, peaks: Peaks) -> float:
    """Return the seconds that the model's useful FLOPs take at the peak rates. MFU is the result ÷ the wall time.

    Products of quantised values count with the peak of their own type, such as int8.
    """
    return sum(_products(costs[name]).seconds(peaks) for costs in _step_costs(run, model) for name in MODEL)


def _step_costs(run: Run, model: ModelCost) -> Iterator[dict[str, Cost]]:
    return (model.step(step) for step in run.shapes)


def _products(cost: Cost) -> Cost:
    # MFU counts the arithmetic of products, without quantisation and bytes
    return Cost(cost.coded_ops or cost.flops, 0, cost.coded_ops)


def run_metrics(run: Run, ideal: Ideal, model: ModelCost, peaks: Peaks) -> RunMetrics:
    """Return the metrics of one timed run: times, counts and efficiencies.

    Args:
        run: The timed run.
        ideal: The work of the ideal job for the same rows.
        model: The costs of the model's operators.
        peaks: The peak rates of the device.
    """
    prefill, decoded, recomputed, padded = (
        sum(getattr(sample, name) for sample in run.steps)
        for name in ("prefill_tokens", "decode_tokens", "recomputed_tokens", "padded_tokens")
    )
    ran = prefill + decoded
    model_s = sum(sample.model_s for sample in run.steps)
    roofline_s = sum(operator_seconds(run, model, peaks).values())
    ideal_s = sum(cost.seconds(peaks) for cost in ideal_costs(ideal, model).values())
    return RunMetrics(
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


def medians(runs: Sequence[RunMetrics]) -> dict[str, float]:
    """Return the median of each metric over several runs, by name. A count that is equal in all runs stays an int."""
    columns = {name: [asdict(run)[name] for run in runs] for name in asdict(runs[0])}
    return {name: _median(values) for name, values in columns.items()}


def _median(values: Sequence[float]) -> float:
    return values[0] if len(set(values)) == 1 else statistics.median(values)
