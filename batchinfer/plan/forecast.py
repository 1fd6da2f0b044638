"""What a plan will cost at the least, before anything runs; compared with what it took in the report."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.plan.plan import Plan
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, step_total


@dataclass(frozen=True, slots=True)
class Forecast:
    """Lower bounds at ideal prefix sharing, every output as long as it may get; None where nothing is known."""

    prefill_tokens: int  # prompt tokens after ideal sharing
    decode_tokens: int  # output tokens, each one run once
    flops: int | None  # None: the model is not known
    bytes: int | None
    seconds: float | None  # at the roofline; None: no cost, or peaks unknown
    kv_bytes: (
        int | None
    )  # K and V of the largest batch of `max_num_seqs` requests, sharing not counted, windows are


def forecast(plan: Plan, cost: ModelCost | None, peaks: Peaks | None, max_num_seqs: int) -> Forecast:
    """Forecast a plan on a decoder. Raises ValueError for `max_num_seqs` < 1.

    Prefill is taken as one large step, decoding as the fewest steps of `max_num_seqs` rows; a prompt or a context
    counts with the plan's mean length, which bounds the attention of a mixture from below. Only decoding in layers with
    a window may take less: of contexts both shorter and longer than the window.
    """
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs is {max_num_seqs}, must be at least 1")
    prefill = plan.prompt_tokens - plan.shared_prefix_tokens
    decode = plan.expected_tokens
    if cost is None:
        return Forecast(prefill, decode, None, None, None, None)
    if not plan.to_run:
        return Forecast(0, 0, 0, 0, None if peaks is None else 0.0, 0)
    rows = min(max_num_seqs, plan.to_run)
    steps = -(-decode // rows)
    once = cost.step(_prefill_step(plan, prefill, cost))
    each = cost.step(_decode_step(plan, rows, cost))
    total = step_total(once) + step_total(each) * steps
    seconds = None
    if peaks is not None:
        bounds = (c.seconds(peaks) for c in once.values()), (c.seconds(peaks) for c in each.values())
        seconds = sum(bounds[0]) + steps * sum(bounds[1])
    kv_bytes = rows * cost.kv_bytes(plan.longest)
    return Forecast(prefill, decode, total.flops, total.bytes, seconds, kv_bytes)


def describe(plan: Plan, at_the_limit: str | None) -> str:
    """The plan in one line, for people, before it runs. `at_the_limit` is the forecast as the summary shows it."""
    rows = f"plan: {plan.rows:,} rows, {plan.error_rows:,} of them bad, {plan.duplicates:,} duplicates"
    if not plan.to_run:
        return f"{rows}; every answer is stored already"
    present = f", {plan.present:,} answers stored already" if plan.present else ""
    tokens = f"{plan.prompt_tokens:,} prompt tokens ({plan.shared_prefix_tokens:,} shared)"
    limit = f"; {at_the_limit} at this hardware's limit if every answer is that long" if at_the_limit else ""
    return f"{rows}{present}; {plan.to_run:,} to run: {tokens} and up to {plan.expected_tokens:,} output tokens{limit}"


def _prefill_step(plan: Plan, tokens: int, cost: ModelCost) -> StepShape:
    mean_prompt = plan.prompt_tokens / plan.to_run
    pairs = int(tokens * cost.pairs(round(mean_prompt)) / max(1, round(mean_prompt)))
    return StepShape(tokens, plan.to_run, pairs, tokens * cost.layers)


def _decode_step(plan: Plan, rows: int, cost: ModelCost) -> StepShape:
    context = int((plan.prompt_tokens + plan.expected_tokens / 2) / plan.to_run)
    return StepShape(rows, rows, rows * cost.seen(context), rows * cost.seen(context))
