"""The one row that sums a run up: what the pipeline knows, what the meter measured, and the peaks."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from batchinfer.machine.datasheet import datasheet
from batchinfer.machine.doctor import installed_version
from batchinfer.machine.hardware import Hardware, codes_of
from batchinfer.report.tables.columns import RUN, RUN_SCHEMA
from batchinfer.report.tables.device_time import LOSSES
from batchinfer.report.tables.exit_status import is_published
from batchinfer.report.tables.folder import prune, table_path
from batchinfer.report.tables.meter import Measured, Totals
from batchinfer.report.tables.percentiles import NAMES, Spread
from batchinfer.report.tables.spool import write_row

_PACKAGES = ("batchinfer", "torch", "transformers", "tokenizers", "duckdb", "pyarrow")

RunRow = dict[str, Any]  # a value, or None for "not known", for every name in RUN_COLUMNS


def versions() -> dict[str, str]:
    """Python and the installed packages that can change results or speed."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v is not None}


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What only the pipeline knows of a run. Every field but the first five may stay None: not known."""

    run_id: str
    job: str
    output: str
    started_at: datetime  # with a time zone
    finished_at: datetime
    model: str | None = None  # org/name@commit, or the checkpoint's folder
    exit_code: int | None = None
    exit_status: str | None = None  # one of exit_status.MEANINGS
    trial: bool | None = None
    versions: Mapping[str, str] = field(default_factory=versions)
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    deterministic: bool | None = None
    ops: Mapping[str, str] | None = None
    replicas: int | None = None
    threads: int | None = None
    other_cores: float | None = None
    rows: int | None = None
    rows_ok: int | None = None
    rows_error: int | None = None
    error_codes: Mapping[str, int] | None = None
    distinct_requests: int | None = None
    duplicate_rows: int | None = None
    reused_requests: int | None = None
    duplicate_saved_tokens: int | None = None
    duplicate_saved_output_tokens: int | None = None
    startup_s: float | None = None
    ingest_s: float | None = None
    plan_s: float | None = None
    load_s: float | None = None
    operators_build_s: float | None = None
    operators_wait_s: float | None = None
    load_capture_s: float | None = None
    load_graph_bytes: int | None = None
    load_free_bytes: int | None = None
    engine_s: float | None = None
    publish_s: float | None = None
    close_s: float | None = None
    other_s: float | None = None
    worker_restarts: int | None = None
    parent_peak_rss_bytes: int | None = None
    worker_peak_rss_bytes: int | None = None
    price_per_hour: float | None = None
    forecast_s: float | None = None
    forecast_steps: int | None = None
    forecast_prompt_tokens: int | None = None
    forecast_recomputed_tokens: int | None = None
    forecast_output_tokens: int | None = None
    forecast_revised_s: float | None = None
    forecast_mfu: float | None = None
    forecast_mbu: float | None = None
    forecast_full_graph_steps: int | None = None
    forecast_piecewise_graph_steps: int | None = None
    forecast_eager_steps: int | None = None
    forecast_full_graph_tokens: int | None = None
    forecast_piecewise_graph_tokens: int | None = None
    forecast_eager_tokens: int | None = None
    forecast_basis: str | None = None
    forecast_answers_from: int | None = None
    deadline: datetime | None = None  # with a time zone
    deadline_rows: int | None = None
    deadline_output_tokens: int | None = None


def run_row(facts: RunFacts, hardware: Hardware | None, measured: Measured | None) -> RunRow:
    """The run table's row. `hardware` or `measured` is None where the run never came to an engine."""
    row: RunRow = dict.fromkeys(RUN_SCHEMA.names)
    row |= {f.name: getattr(facts, f.name) for f in fields(facts)}
    row["wall_s"] = (facts.finished_at - facts.started_at).total_seconds()
    row |= _deadline_columns(facts)
    if hardware is not None:
        row |= _hardware_columns(hardware, facts)
    if measured is not None:
        row["forecast_error"] = _over(_minus(measured.totals.wall_s, facts.forecast_s), facts.forecast_s)
        row |= _token_columns(measured.totals) | _time_columns(measured.totals)
        row |= _efficiency_columns(measured.totals, row["peak_flops_per_s"], row["peak_bytes_per_s"])
        row |= dict(_latency_columns(measured))
        row |= _energy_columns(measured)
        row |= {f"device_{part}": value for part, value in _device_columns(measured.device)}
    row |= _cost_columns(row)
    return row | _wall_columns(row, measured)


def _energy_columns(measured: Measured) -> RunRow:
    energy = measured.energy
    tokens = (
        measured.totals.prefill_tokens - measured.totals.recomputed_tokens + measured.totals.output_tokens
    )
    return {
        "energy_j": energy.whole_j,
        "cpu_energy_j": energy.cpu_j,
        "gpu_energy_j": energy.gpu_j,
        "energy_j_per_token": _over(energy.whole_j, tokens),
    }


def _cost_columns(row: RunRow) -> RunRow:
    def cost(seconds: float | None) -> float | None:
        price = row["price_per_hour"]
        return None if price is None or seconds is None else price * seconds / 3600

    timed = {"cost": "wall_s", "engine_cost": "engine_wall_s", "forecast_engine_cost": "forecast_s"}
    return {name: cost(row[seconds]) for name, seconds in timed.items()}


def _device_columns(device: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    for part, seconds in device.items():
        yield (f"{part}_loss_s" if part in LOSSES else f"{part}_s"), seconds


def _wall_columns(row: RunRow, measured: Measured | None) -> RunRow:
    """The five parts of the wall time. Of a phase that the run never reached there is no part."""
    totals = measured.totals if measured is not None else Totals()
    rest = _minus(row["engine_s"], totals.model_s + totals.waited_s)
    return {
        "wall_load_s": _known_sum(row["startup_s"], row["load_s"]),
        "wall_input_s": _known_sum(row["ingest_s"], row["plan_s"], totals.waited_s or None),
        "wall_device_s": row["model_s"],
        "wall_host_s": _known_sum(rest, row["other_s"]),
        "wall_output_s": _known_sum(row["publish_s"], row["close_s"]),
    }


def _known_sum(*values: float | None) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _deadline_columns(facts: RunFacts) -> RunRow:
    if facts.deadline is None:
        return {}
    until = min(facts.deadline, facts.finished_at)
    return {
        "deadline_met": is_published(facts.exit_status) and facts.finished_at <= facts.deadline,
        "goodput_tokens_per_s": _over(
            facts.deadline_output_tokens, max(0.0, (until - facts.started_at).total_seconds())
        ),
    }


def _hardware_columns(hardware: Hardware, facts: RunFacts) -> RunRow:
    stated, linear = datasheet(hardware.name), facts.dtype or ""
    if facts.quantization not in (None, "none"):
        linear = codes_of(facts.quantization)
    devices = 1 if hardware.device == "cpu" else facts.replicas or 1  # engines on a CPU share it
    return {
        "device": hardware.device,
        "hardware": hardware.name,
        "cores": hardware.cores,
        "peak_flops_per_s": _times(hardware.peak_flops.get(linear), devices),
        "peak_bytes_per_s": _times(hardware.bandwidth, devices),
        "peak_source": hardware.source,
        "datasheet_flops_per_s": _times(stated.peak_flops.get(linear), devices) if stated else None,
        "datasheet_bytes_per_s": _times(stated.bandwidth, devices) if stated else None,
    }


def _token_columns(totals: Totals) -> RunRow:
    ran = totals.prefill_tokens + totals.decode_tokens
    return {
        "computed_requests": totals.requests,
        "prompt_tokens_run": totals.prefill_tokens - totals.recomputed_tokens,
        "prefix_saved_tokens": totals.cached_tokens,
        "decode_tokens_run": totals.decode_tokens,
        "output_tokens": totals.output_tokens,
        "sampled_tokens": totals.sampled_tokens,
        "recomputed_tokens": totals.recomputed_tokens,
        "padded_tokens": totals.padded_tokens,
        "padding_share": _over(totals.padded_tokens, ran + totals.padded_tokens),
        "recomputed_share": _over(totals.recomputed_tokens, ran),
        "preemptions": totals.preemptions,
        "constrained_requests": totals.constrained_requests,
        "steered_requests": totals.steered_requests,
        "forced_tokens": totals.forced_tokens,
        "mask_s": totals.mask_s,
        "compile_s": totals.compile_s,
        "steps": totals.steps,
        **totals.launches.columns(),
        "capture_s": totals.capture_s,
        "graph_bytes": totals.graph_bytes,
    }


def _time_columns(totals: Totals) -> RunRow:
    prompt = _over(totals.prefill_tokens - totals.recomputed_tokens, totals.wall_s)
    output = _over(totals.output_tokens, totals.wall_s)
    return {
        "engine_wall_s": totals.wall_s,
        "model_s": totals.model_s,
        "overhead_s": totals.step_s - totals.model_s,
        "idle_s": totals.idle_s,
        "metering_s": totals.metering_s,
        "prompt_tokens_per_s": prompt,
        "output_tokens_per_s": output,
        "total_tokens_per_s": None if prompt is None or output is None else prompt + output,
    }


def _efficiency_columns(totals: Totals, flops_per_s: float | None, bytes_per_s: float | None) -> RunRow:
    ran = totals.steps > 0  # without a step the sums say nothing
    return {
        "flops": totals.flops,
        "bytes_moved": totals.bytes_moved,
        "mfu": _over(_over(totals.flops, totals.wall_s), flops_per_s),
        "mbu": _over(_over(totals.bytes_moved, totals.wall_s), bytes_per_s),
        "roofline_s": totals.roofline_s if ran else None,
        "roofline_efficiency": _over(totals.roofline_s, totals.wall_s),
        "step_bound_s": totals.step_bound_s if ran else None,
        "step_bound_efficiency": _over(totals.step_bound_s, totals.wall_s),
    }


def _latency_columns(measured: Measured) -> Iterator[tuple[str, float | None]]:
    spreads: dict[str, Spread] = {
        "queue": measured.queue,
        "ttft": measured.ttft,
        "tpot": measured.tpot,
        "itl": measured.itl,
        "latency": measured.latency,
    }
    for stem, values in spreads.items():
        for name, value in zip(NAMES, values, strict=True):
            yield f"{stem}_{name}_s", value


def _over(top: float | None, bottom: float | None) -> float | None:
    """A quotient, or None where either side is unknown or there is nothing to divide by."""
    return None if top is None or not bottom else top / bottom


def _times(value: float | None, times: int) -> float | None:
    return None if value is None else value * times


def _minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def write_run(folder: Path, row: RunRow) -> Path:
    """Write the run table, whole or not at all; drop what is no longer kept. Raises OSError, ValueError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = write_row(table_path(folder, RUN, str(row["run_id"])), RUN_SCHEMA, row)
    prune(folder)
    return path
