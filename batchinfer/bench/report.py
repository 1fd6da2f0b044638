"""The report of a benchmark, as JSON and as a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from typing import Any

from batchinfer.bench.ideal import Ideal
from batchinfer.bench.metrics import decode_step_seconds, medians, operator_seconds, run_metrics
from batchinfer.bench.options import BenchOptions
from batchinfer.bench.peer import PeerRun
from batchinfer.bench.runs import Run
from batchinfer.bench.workloads import Workload
from batchinfer.core.version import __version__
from batchinfer.engine.config import EngineInfo
from batchinfer.machine.hardware import coded_text, codes_of, detect
from batchinfer_kernels.arithmetic import Device
from batchinfer_kernels.cost import ModelCost, Peaks

WIDTH = 24  # width of the table's first column
OPERATORS_SHOWN = 4


@dataclass(slots=True)
class Series:
    """The timed runs of one workload in several variants, each with one run per repetition.

    Attributes:
        ours: Plain runs.
        without: Runs without deduplication, if the workload has duplicates.
        under: Runs with JSON Schemas, by the number of different schemas.
        drafted: Runs with draft tokens.
        peer: Runs with transformers, if it is compared.
    """

    ours: list[Run] = field(default_factory=list)
    without: list[Run] = field(default_factory=list)
    under: dict[int, list[Run]] = field(default_factory=dict)
    drafted: list[Run] = field(default_factory=list)
    peer: list[PeerRun] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class WorkloadResult:
    """The timed runs of a workload, its ideal job, and its forecast.

    Attributes:
        workload: The workload.
        ideal: The work of the ideal job.
        series: The timed runs.
        forecast_s: The forecast time in the engine, in seconds; None if step times are not measured.
    """

    workload: Workload
    ideal: Ideal
    series: Series
    forecast_s: float | None = None

    def to_json(self, cost: ModelCost, peaks: Peaks, peer: str | None) -> dict[str, Any]:
        """Return the metrics of the workload as JSON: medians over the runs, in seconds, tokens and fractions.

        Args:
            cost: The costs of the model's operators.
            peaks: The peak rates of the device.
            peer: Name of the engine that is compared, or None.
        """
        metrics = medians([run_metrics(run, self.ideal, cost, peaks) for run in self.series.ours])
        walls = [run.wall_s for run in self.series.ours]
        tokens = self.workload.prompt_tokens + self.workload.output_tokens
        wall = metrics.pop("wall_s")
        result: dict[str, Any] = {
            "workload": self.workload.name,
            "rows": len(self.workload.rows),
            "duplicates": self.workload.duplicates,
            "prompt_tokens": self.workload.prompt_tokens,
            "output_tokens": self.workload.output_tokens,
            "wall_s": _times(walls),
            "output_tokens_per_s": self.workload.output_tokens / wall,
            "tokens_per_s": tokens / wall,
            **metrics,
            "prompt_tokens_optimum": self.ideal.prefill_tokens,
            "decode_tokens_optimum": self.ideal.decode_tokens,
            "operators_s": self._operators(cost, peaks),
            **self._forecast(),
        }
        if self.series.without:
            others = [run.wall_s for run in self.series.without]
            result["without_deduplication"] = {"wall_s": _times(others), "relative": _relative(walls, others)}
        if self.series.under:
            result["under_schemas"] = [
                _under(number, runs, self.series.ours) for number, runs in self.series.under.items()
            ]
        if self.series.drafted:
            result["with_drafts"] = _with_drafts(self.series.drafted, self.series.ours)
        if self.series.peer and peer is not None:
            result["against"] = self._against(walls, peer)
        return result

    def _operators(self, cost: ModelCost, peaks: Peaks) -> dict[str, float]:
        middle = sorted(self.series.ours, key=lambda run: run.wall_s)[len(self.series.ours) // 2]
        seconds = operator_seconds(middle, cost, peaks)
        return dict(sorted(seconds.items(), key=lambda item: -item[1]))

    def _forecast(self) -> dict[str, float | None]:
        # Forecasts do not include the time of planning
        engine = statistics.median(run.wall_s - run.plan_s for run in self.series.ours)
        error = None if not self.forecast_s else engine / self.forecast_s - 1
        return {"engine_s": engine, "forecast_s": self.forecast_s, "forecast_error": error}

    def _against(self, walls: Sequence[float], peer: str) -> dict[str, Any]:
        others = [run.wall_s for run in self.series.peer]
        same = [a == b for a, b in zip(self.series.ours[0].answers, self.series.peer[0].answers, strict=True)]
        return {
            "name": peer,
            "version": version(peer),
            "wall_s": _times(others),
            "relative": _relative(walls, others),
            "equal_rows": sum(same) / len(same),
        }


@dataclass(frozen=True)
class BenchReport:
    """The results of all workloads, with the settings with which they ran.

    Attributes:
        options: The options of the command.
        info: The settings that the engine used.
        cost: The costs of the model's operators.
        peaks: The peak rates of the device.
        results: One result per workload.
    """

    options: BenchOptions
    info: EngineInfo
    cost: ModelCost
    peaks: Peaks
    results: tuple[WorkloadResult, ...]

    @cached_property
    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object: the settings, and an object per workload in `results`."""
        return {
            "batchinfer": __version__,
            "torch": version("torch"),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "hardware": detect(self.options_device).name,
            "model": self.options.model,
            "dummy_weights": self.options.is_shape,
            "repeat": self.options.repeat,
            "kv_cache_dtype": self.options.kv_cache_dtype,
            **asdict(self.info),
            "peaks": asdict(self.peaks),
            "results": [
                result.to_json(self.cost, self.peaks, self.options.against) for result in self.results
            ],
        }

    @property
    def options_device(self) -> Device:
        """Return the kind of device of the runs: "cpu" or "cuda".

        It is not in `info`, whose `device` is the name of a GPU.
        """
        return "cpu" if self.info.device == "cpu" else "cuda"

    def table(self) -> str:
        """Return the report as text for people: one block per workload."""
        return "\n\n".join([self._head(), *(_block(result) for result in self.json["results"])])

    def _head(self) -> str:
        info, peaks = self.info, self.peaks
        weights = "dummy weights" if self.options.is_shape else "its weights"
        codes = codes_of(info.quantization, self.options_device)
        quantised = f", {coded_text(info.quantization)} weights" if info.quantization != "none" else ""
        kept = self.options.kv_cache_dtype
        quantised += f", {kept} KV cache" if kept != "auto" else ""
        certain = ", deterministic" if info.deterministic else ""
        integer = f", {_giga(peaks.coded_ops_per_s)}OP/s in {codes}" if peaks.coded_ops_per_s else ""
        return "\n".join(
            [
                f"{self.options.model} ({weights}) in {info.dtype}{quantised}{certain} on {self.json['hardware']}, "
                f"{info.threads} thread{'s' * (info.threads != 1)}, {info.ops} operators",
                f"peaks of this run: {_giga(peaks.flops_per_s)}FLOP/s in {info.dtype}{integer}, "
                f"{_giga(peaks.bytes_per_s)}B/s",
            ]
        )


def _block(result: dict[str, Any]) -> str:
    lines = [
        (
            result["workload"],
            f"{result['rows']:,} rows ({result['duplicates']:,} of them duplicates), {result['prompt_tokens']:,} "
            f"prompt tokens, {result['output_tokens']:,} output tokens",
        ),
        *((f"  {name}", text) for name, text in _lines(result)),
    ]
    return "\n".join(f"{name:<{WIDTH}}{text}".rstrip() for name, text in lines)


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    wall, operators = result["wall_s"], result["operators_s"]
    top = [f"{name} {seconds:.2f} s" for name, seconds in list(operators.items())[:OPERATORS_SHOWN]]
    roofline, plan = _percent(result["roofline_efficiency"]), _percent(result["plan_efficiency"])
    lines = [
        ("time", f"{_seconds(wall)}, {result['plan_s']:.2f} s of it planning"),
        (
            "throughput",
            f"{result['output_tokens_per_s']:,.0f} output tokens/s, {result['tokens_per_s']:,.0f} in all",
        ),
        ("forecast", _forecast(result)),
        ("MFU", _percent(result["mfu"])),
        ("MBU", _percent(result["mbu"])),
        (
            "roofline efficiency",
            f"{roofline}: the bound is {result['roofline_s']:.2f} s",
        ),
        (
            "plan efficiency",
            f"{plan}: the ideal job's bound is {result['ideal_s']:.2f} s",
        ),
        ("step bound", f"{result['step_bound_s']:.2f} s, if a step's operators overlapped perfectly"),
        ("bound by operator", ", ".join(top)),
        ("outside the model", _percent(result["overhead_share"])),
        (
            "padding, run again",
            f"{_percent(result['padding_share'])}, {_percent(result['recomputed_share'])}",
        ),
        ("rows run", f"{result['rows_run']:,} in {result['steps']:,} steps"),
        ("decode step", f"{1000 * result['decode_step_s']:.1f} ms"),
        (
            "prompt tokens run",
            f"{result['prompt_tokens_run']:,}; {result['prompt_tokens_optimum']:,} would be the fewest",
        ),
    ]
    return [*lines, *_compared(result)]


def _forecast(result: dict[str, Any]) -> str:
    if result["forecast_s"] is None:
        return "none: `batchinfer doctor --measure` has not measured steps in this arithmetic"
    return (
        f"{result['forecast_s']:.2f} s without planning, which took {result['engine_s']:.2f} s "
        f"({100 * result['forecast_error']:+.1f} %)"
    )


def _compared(result: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if "without_deduplication" in result:
        other = result["without_deduplication"]
        lines.append(
            ("duplicates run, too", f"{_seconds(other['wall_s'])}; ours is {other['relative']:.2f} of it")
        )
    for other in result.get("under_schemas", ()):
        step = f"a decode step {1000 * other['decode_step_s']:.1f} ms, {other['step_relative']:.3f} of it"
        work = f"{step}; masks {other['mask_s']:.2f} s, compiling {other['compile_s']:.2f} s"
        lines.append(
            (
                f"under {other['schemas']} schema{'s' * (other['schemas'] != 1)}",
                f"{_seconds(other['wall_s'])}, {other['relative']:.2f} of ours without; {work}",
            )
        )
    if "with_drafts" in result:
        other = result["with_drafts"]
        work = f"{other['accepted_tokens']:,} of {other['drafted_tokens']:,} drafts accepted"
        lines.append(
            (
                "with drafts",
                f"{_seconds(other['wall_s'])}, {other['relative']:.2f} of ours without; {work}",
            )
        )
    if "against" in result:
        other = result["against"]
        same = f"{_percent(other['equal_rows'])} of rows have the same answer"
        lines.append(
            (other["name"], f"{_seconds(other['wall_s'])}; ours is {other['relative']:.2f} of it; {same}")
        )
    return lines


def _under(schemas: int, runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    own, walls = ([run.wall_s for run in series] for series in (runs, plain))
    steps, plain_steps = ([decode_step_seconds(run) for run in series] for series in (runs, plain))
    spent = {
        name: statistics.median(sum(getattr(step, name) for step in run.steps) for run in runs)
        for name in ("mask_s", "compile_s")
    }
    return {
        "schemas": schemas,
        "wall_s": _times(own),
        "relative": _relative(own, walls),
        "decode_step_s": statistics.median(steps),
        "step_relative": _relative(steps, plain_steps),
        **spent,
    }


def _with_drafts(runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    own, walls = ([run.wall_s for run in series] for series in (runs, plain))
    counts = {
        name: statistics.median_high(sum(getattr(step, name) for step in run.steps) for run in runs)
        for name in ("drafted_tokens", "accepted_tokens")
    }
    return {"wall_s": _times(own), "relative": _relative(own, walls), **counts}


def _times(seconds: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(seconds), "min": min(seconds), "runs": list(seconds)}


def _relative(ours: Sequence[float], others: Sequence[float]) -> float:
    # The median over repetitions of quotients: other load in a repetition slows both
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def _seconds(times: dict[str, Any]) -> str:
    return f"{times['median']:.2f} s (fastest {times['min']:.2f} s of {len(times['runs'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.1f} G"
