"""Formats a forecast as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from batchinfer.core.samples import LAUNCH_MODES
from batchinfer.core.statistics.quality import Quality
from batchinfer.core.wording import count, counted, percent, seconds, short_number, size
from batchinfer.machine.devices import Devices
from batchinfer.plan.forecast.engine import EngineForecast
from batchinfer.plan.forecast.idle import IdleForecast
from batchinfer.plan.forecast.job import JobForecast, Lengths
from batchinfer.plan.forecast.layouts import LayoutForecast
from batchinfer.plan.forecast.lint import finding_text
from batchinfer.plan.forecast.sampled_rows import SampledRows
from batchinfer.plan.forecast.step_times import DECLARED_EFFICIENCY
from batchinfer.plan.forecast.time_range import CPU_SHARE
from batchinfer.plan.order.plan import Plan
from batchinfer.plan.order.prefixes import PlannedPrefix
from batchinfer.report.summary import launch_text

MOST_REFUSED = 4  # refused layouts that are listed with a reason
NAME = 10  # width of a line's name, in characters
MOST_CODES = 3
UPPER_BOUND = "(upper bound: no earlier run to learn lengths from)"


def layout_lines(layouts: Sequence[LayoutForecast], devices: Devices) -> Iterator[tuple[str, str]]:
    """Yield lines that compare the layouts of a job on several devices, as pairs of a heading and a text.

    A layout is a number of engines and the sharding of each. The order is: the devices, the layouts that fit (the
    chosen one first), the refused layouts.
    """
    yield (
        "layouts",
        f"{devices.name}, {devices.links}; expected, and never run on a GPU; bytes are per device",
    )
    for layout in layouts:
        if layout.refused is None:
            yield "", _fitting(layout)
    refused = [layout for layout in layouts if layout.refused is not None]
    for layout in refused[:MOST_REFUSED]:
        yield "", f"{layout.name}: {layout.refused}"
    if len(refused) > MOST_REFUSED:
        names = "; ".join(layout.name for layout in refused[MOST_REFUSED:])
        yield "", f"refused, too: {names}"
    if layouts[0].chosen:
        asked = ", ".join(f"{name}: {value}" for name, value in layouts[0].options.items())
        yield "", f"the chosen one: engine: {{{asked}}}"


def _fitting(layout: LayoutForecast) -> str:
    told = [] if layout.seconds is None else [seconds(layout.seconds)]
    told.append(f"weights {size(layout.weight_bytes or 0)}, KV cache {size(layout.kv_bytes or 0)}")
    if layout.waits is not None:
        told.append(f"stages wait {percent(layout.waits)} of the time")
    if layout.imbalance is not None:
        told.append(f"its fullest rank of experts has {layout.imbalance:.2f} times the mean's tokens")
    if layout.not_run is not None:
        told.append(f"not offered: {layout.not_run}")
    if layout.seconds is not None and not layout.simulated:
        told.append("estimated")
    chosen = "chosen, the fastest that runs: " if layout.chosen else ""
    return f"{chosen}{layout.name}: {', '.join(told)}"


def forecast_lines(found: JobForecast, price_per_hour: float | None) -> list[str]:
    """Return a forecast as lines for people: a heading, and a line for each part that is known.

    Args:
        found: The forecast.
        price_per_hour: Price of an hour of the machine, in any currency. None: no cost is shown.
    """
    named = _named(found, price_per_hour)
    return [f"{found.job}: {found.setting}", *(f"  {name:<{NAME}}{text}" for name, text in named)]


def plan_line(plan: Plan) -> str:
    """Return the counts of a plan as one line for people, before it runs."""
    duplicates = counted(plan.duplicates, "duplicate")
    rows = f"plan: {counted(plan.rows, 'row')}, {counted(plan.error_rows, 'error row')}, {duplicates}"
    if not plan.to_run:
        return f"{rows}; every answer is stored already"
    present = f", {counted(plan.present, 'answer')} stored already" if plan.present else ""
    shared = f" ({plan.shared_prefix_tokens:,} shared)" if plan.shared_prefix_tokens else ""
    tokens = f"{plan.prompt_tokens:,} prompt tokens{shared}"
    output = f" and up to {plan.expected_tokens:,} output tokens" if plan.expected_tokens else ""
    return f"{rows}{present}; {_to_run(plan)} to run: {tokens}{output}"


def _to_run(plan: Plan) -> str:
    calibrating = " and the prompt of classify.calibrate" if plan.without_rows else ""
    return f"{count(plan.answers_to_run)}{calibrating}"


def engine_text(forecast: EngineForecast) -> str:
    """Return the engine time of a forecast and its origin as a phrase. The time must be known."""
    which = f"MFU {percent(forecast.mfu)}, MBU {percent(forecast.mbu)}"
    bound = f" {UPPER_BOUND}" if forecast.upper_bound else ""
    return f"{seconds(forecast.seconds)}{bound}, {counted(forecast.run.steps, 'step')}, {which}; {_known(forecast)}"


def range_line(forecast: EngineForecast) -> tuple[str, ...]:
    """Return a line with the range of the whole run's time and of its parts, or an empty tuple if it is unknown."""
    within = forecast.within
    if within is None:
        return ()
    basis = f"as in {counted(within.runs, 'earlier run')}" if within.runs else "assumed, before the first run"
    return (
        f"{_span(within.run_s)}: the engine {_span(within.engine_s)}; start, reading, loading and publishing "
        f"{_span(within.other_s)} ({basis})",
    )


def _span(within: tuple[float, float]) -> str:
    return f"{seconds(within[0])} to {seconds(within[1])}"


def drafts_line(forecast: EngineForecast) -> tuple[str, ...]:
    """Return a line about the draft tokens of the last run, which the forecast ignores. Empty without drafts."""
    before = forecast.proposals
    if before is None:
        return ()
    right = f"{percent(before.accepted / before.drafted)} of {short_number(before.drafted)} proposed tokens were right"
    if before.saved_s is None:
        return (f"{right} in the last run; none are forecast",)
    what = "saved" if before.saved_s >= 0 else "lost"
    return (f"{right} in the last run, and {what} about {seconds(abs(before.saved_s))}; none are forecast",)


def forecast_json(found: JobForecast, price_per_hour: float | None) -> dict[str, Any]:
    """Return a forecast as a JSON object. Values that are unknown or do not apply are null.

    Args:
        found: The forecast.
        price_per_hour: Price of an hour of the machine, in any currency. None: the cost is null.
    """
    plan, lengths, memory, forecast = found.plan, found.lengths, found.memory, found.forecast
    return {
        "job": found.job,
        "setting": found.setting,
        "rows": plan.rows,
        "error_rows": plan.error_rows,
        "error_codes": found.error_codes,
        "duplicate_rows": plan.duplicates,
        "stored": plan.present,
        "to_run": plan.answers_to_run,
        "prompt_tokens": plan.prompt_tokens,
        "shared_prefix_tokens": plan.shared_prefix_tokens,
        "most_output_tokens": plan.expected_tokens,
        "prompt_lengths": None
        if lengths is None
        else {
            "shortest": lengths.shortest,
            "median": lengths.median,
            "longest": lengths.longest,
            "buckets": [{"tokens_at_most": most, "prompts": number} for most, number in lengths.buckets],
        },
        "sample": None if found.sample is None else asdict(found.sample),
        "context": {"tokens": found.context, "rows_over": found.rows_over},
        "prefixes": [_node_json(node) for node in found.prefixes],
        "memory": None
        if memory is None
        else {"weight_bytes": memory.weights, "kv_cache_bytes": memory.kv_cache, "blocks": memory.blocks},
        "quantizations": [asdict(one) for one in found.quantizations],
        "hardware": None if found.devices is None else _devices_json(found.devices),
        "layouts": [asdict(one) for one in found.layouts],
        "quality": found.quality,
        "earlier_answers": None if found.earlier is None else asdict(found.earlier),
        "misfit": found.misfit,
        "forecast": None if forecast is None else _forecast_json(forecast, price_per_hour),
        "drafting": None if found.drafting is None else _forecast_json(found.drafting, price_per_hour),
        "calibration": None if found.calibration is None else asdict(found.calibration),
        "draft_model": found.draft_model,
        "experts": found.experts,
        "idle": None if found.idle is None else asdict(found.idle),
        "lint": [asdict(finding) for finding in found.findings],
        "deadline": None
        if found.deadline is None
        else {"at": found.deadline.at.isoformat(), "spare_s": found.deadline.spare_s},
        "stop": None if found.stop is None else found.stop.to_json(),
    }


def _devices_json(devices: Devices) -> dict[str, Any]:
    return {"name": devices.hardware.name, "devices": devices.in_node, "nodes": devices.nodes}


def _node_json(node: PlannedPrefix) -> dict[str, Any]:
    return {name: value for name, value in asdict(node).items() if name != "token_offset"}


def _forecast_json(forecast: EngineForecast, price_per_hour: float | None) -> dict[str, Any]:
    run = forecast.run
    return {
        "engine_s": forecast.seconds,
        "engine_range_s": None if forecast.within is None else list(forecast.within.engine_s),
        "run_range_s": None if forecast.within is None else list(forecast.within.run_s),
        "steps": run.steps,
        "prompt_tokens_run": run.prompt_tokens,
        "recomputed_tokens": run.recomputed_tokens,
        "cached_tokens": run.cached_tokens,
        "decode_tokens": run.decode_tokens,
        "output_tokens": run.output_tokens,
        "preemptions": run.preemptions,
        "launches": None
        if run.launches is None
        else {
            mode: {unit: run.launches[f"{mode}_{unit}"] for unit in ("steps", "tokens")}
            for mode in LAUNCH_MODES
        },
        "stage_waits": forecast.waits,
        "mfu": forecast.mfu,
        "mbu": forecast.mbu,
        "simulated_share": forecast.simulated,
        "answers_from_runs": forecast.answers_from,
        "upper_bound": forecast.upper_bound,
        "times_from": forecast.times.basis,
        "times_from_runs": forecast.times.runs,
        "drafts_before": None if forecast.proposals is None else asdict(forecast.proposals),
        "energy_j": forecast.energy_j,
        "cost": _cost(forecast, price_per_hour),
    }


def _named(found: JobForecast, price_per_hour: float | None) -> Iterator[tuple[str, str]]:
    plan = found.plan
    yield "rows", f"{count(plan.rows)}: {_bad(found)}, {counted(plan.duplicates, 'duplicate')}"
    yield "work", f"{counted(plan.present, 'answer')} stored already, {_to_run(plan)} to run"
    if found.earlier is not None:
        yield "again", found.earlier.text
    if found.sample is not None:
        yield "sample", _sample_text(found.sample)
    if found.rows_over:
        longer = counted(found.rows_over, "row")
        yield "context", f"{longer} longer than {count(found.context)} tokens, the model's maximum"
    if found.lengths is None:
        return
    yield "prompts", f"{short_number(plan.prompt_tokens)} tokens{_shared(plan)}"
    yield from _tree(found.prefixes)
    yield "lengths", _spread(found.lengths)
    if found.misfit is not None:
        yield "memory", f"does not fit: {found.misfit}"
    if found.quantizations:
        yield "weights", _quantizations(found)
    if found.layouts and found.devices is not None:
        yield from layout_lines(found.layouts, found.devices)
    if found.quality is not None:
        yield "quality", f"{Quality(**found.quality)}, as measured by an earlier run"
    if found.experts is not None:
        yield "experts", experts_text(**found.experts)
    if found.memory is None or found.forecast is None:
        return
    yield "answers", _answers(found.forecast, plan.expected_tokens)
    memory = found.memory
    yield (
        "memory",
        f"weights {size(memory.weights)}, KV cache {size(memory.kv_cache)} ({count(memory.blocks)} blocks of "
        f"{memory.block_size} tokens)",
    )
    yield from _times(found.forecast, price_per_hour)
    if found.drafting is None and found.calibration is None:  # the range includes neither
        yield from (("whole run", line) for line in range_line(found.forecast))
    if found.calibration is not None:
        yield "int4", found.calibration.text
    if found.drafting is not None and found.drafting.seconds is not None:
        yield "drafts", f"{engine_text(found.drafting)}: the draft model's answers, before the engine's time"
    for line in drafts_line(found.forecast):
        yield "drafts", line
    if found.draft_model is not None:
        yield "drafts", _draft_model(**found.draft_model)
    if found.idle is not None:
        yield "idle", _idle(found.idle)
    if found.deadline is not None:
        yield "deadline", found.deadline.text
    if found.stop is not None:
        yield "stop", found.stop.text
    for finding in found.findings:
        yield "lint", finding_text(finding)


def experts_text(
    placement: str, ranks: int, why: str, in_ranges: float | None, expected: float | None, repeated: int
) -> str:
    """Return a sentence about the assignment of experts to ranks. The arguments are the values of `ExpertPlan.facts`.

    Args:
        placement: "ranges": each rank has a contiguous range of experts. "loads": experts are assigned by measured
            loads.
        ranks: Number of ranks that share the experts.
        why: The reason for the placement.
        in_ranges: Load of the most loaded rank divided by the mean, with contiguous ranges. None if unknown.
        expected: Load of the most loaded rank divided by the mean, with this placement. None if unknown.
        repeated: Number of extra copies of experts.
    """
    if in_ranges is None or expected is None:
        return f"in ranges on {ranks} ranks: {why}"
    most = f"the most loaded of {ranks} ranks has {in_ranges:.2f} times the mean's tokens"
    if placement == "ranges":
        return f"in ranges: {why}; {most}"
    copies = f", with {counted(repeated, 'repeated expert')}" if repeated else ""
    return f"{why}: {most} with ranges, and {expected:.2f} times as placed{copies}"


def _draft_model(runs: str, why: str) -> str:
    does = (
        "proposes tokens in the engine of the job's model" if runs == "beside" else "answers all rows first"
    )
    return f"the draft model {does}: {why}"


def _tree(prefixes: list[PlannedPrefix]) -> Iterator[tuple[str, str]]:
    depth: dict[int | None, int] = {None: 0}
    for node in prefixes:
        depth[node.node] = depth[node.parent] + 1
        more = " more" if node.parent is not None else ""
        what = f"{counted(node.own_tokens, 'token')}{more} shared by {count(node.users)} rows: saves "
        name = "tree" if node is prefixes[0] else ""
        yield name, "  " * depth[node.parent] + what + short_number(node.saved_tokens)


def _shared(plan: Plan) -> str:
    if not plan.shared_prefix_tokens:
        return ""
    share = percent(plan.shared_prefix_tokens / max(1, plan.prompt_tokens))
    return f", {short_number(plan.shared_prefix_tokens)} of them ({share}) in prefixes that an earlier row shares"


def _sample_text(sample: SampledRows) -> str:
    far = (
        "too few to estimate the error of token counts"
        if sample.error is None
        else f"token counts are off by at most {percent(sample.error)} (95% confidence)"
    )
    return (
        f"counts are scaled from {count(sample.rows)} of {count(sample.of_rows)} rows: {far}; there may be more "
        "duplicates and shared prefixes, because a row whose twin is outside the sample looks unique"
    )


def _bad(found: JobForecast) -> str:
    if not found.plan.error_rows:
        return "no error rows" if found.sample is None else "no error rows in the sample"
    codes = sorted(found.error_codes.items(), key=lambda one: -one[1])
    told = ", ".join(f"{code} {number}" for code, number in codes[:MOST_CODES])
    more = ", …" if len(codes) > MOST_CODES else ""
    return f"{counted(found.plan.error_rows, 'error row')} ({told}{more})"


def _spread(lengths: Lengths) -> str:
    buckets = ", ".join(f"{count(number)} of at most {most}" for most, number in lengths.buckets)
    return f"{lengths.shortest} to {lengths.longest} tokens, median {lengths.median}: {buckets}"


def _answers(forecast: EngineForecast, most: int) -> str:
    if not most:
        return "made of the prompts alone, without a token of output"
    if forecast.answers_from:
        runs = counted(forecast.answers_from, "earlier run")
        expected = short_number(forecast.run.output_tokens)
        return f"{expected} tokens, with lengths as in {runs}; {short_number(most)} at most"
    return f"{short_number(most)} tokens {UPPER_BOUND if forecast.upper_bound else '(every answer has a fixed length)'}"


def _times(forecast: EngineForecast, price_per_hour: float | None) -> Iterator[tuple[str, str]]:
    run = forecast.run
    steps = f"{count(run.steps)} steps"
    if forecast.seconds is None:
        yield (
            "engine",
            f"{steps}; how long they take is not known: run `batchinfer doctor --measure` once on this machine",
        )
        return
    yield "engine", engine_text(forecast)
    if (launched := launch_text(run.launches or {})) is not None:
        yield "", launched
    if forecast.waits is not None:
        yield "", f"stages wait {percent(forecast.waits)} of the time on average"
    if forecast.simulated < 1:
        yield "", f"extrapolated from simulating {percent(forecast.simulated)} of the rows"
    if forecast.energy_j is not None:
        yield (
            "energy",
            f"{short_number(forecast.energy_j)}J, if the machine takes as much power as in earlier runs",
        )
    cost = _cost(forecast, price_per_hour)
    if cost is not None:
        yield "cost", f"{cost:,.2f} at {price_per_hour:g} an hour, for the engine's time"


def _quantizations(found: JobForecast) -> str:
    told = []
    for one in found.quantizations:
        took = "" if one.seconds is None else f" and {seconds(one.seconds)}"
        misfit = "" if one.fits else ", and does not fit"
        mark = " (this job)" if one.chosen else ""
        told.append(f"{one.quantization}{mark} {size(one.weight_bytes)}{took}{misfit}")
    known = any(one.seconds is not None for one in found.quantizations)
    basis = "; seconds without what earlier runs tell" if known else ""
    return f"model.quantization: {', '.join(told)}{basis}"


def _idle(idle: IdleForecast) -> str:
    named = (
        ("input", idle.input_s), ("planning", idle.plan_s), ("loading", idle.load_s),
        ("the other engines' last rows", idle.tail_s), ("publishing", idle.publish_s),
    )  # fmt: skip
    told = ", ".join(f"{seconds(took)} for {cause}" for cause, took in named if took)
    if idle.runs:
        basis = f"from loading on as in {counted(idle.runs, 'earlier run')}"
    else:
        basis = "loading and publishing are not known before the first run"
    return f"devices wait {seconds(idle.total_s)}: {told} ({basis})"


def _known(forecast: EngineForecast) -> str:
    if forecast.times.basis == "runs":
        return f"steps as fast as in {counted(forecast.times.runs, 'earlier run')}"
    if forecast.times.basis == "measured":
        return "steps as fast as `batchinfer doctor --measure` measured on this machine"
    if forecast.times.basis == "declared":
        share = percent(DECLARED_EFFICIENCY)
        return f"steps at {share} of the hardware's peaks: an assumption, until a run on this machine measures it"
    share = percent(CPU_SHARE)
    return (
        f"steps at {share} of the hardware's peaks: an assumption; `batchinfer doctor --measure` measures it"
    )


def _cost(forecast: EngineForecast, price_per_hour: float | None) -> float | None:
    if price_per_hour is None or forecast.seconds is None:
        return None
    return forecast.seconds / 3600 * price_per_hour
