"""The record for people: short, a line a result, what failed last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.gpu_suite.host_table import (
    WIDTH,
    duration,
    host_lines,
    launch_lines,
    memory_lines,
    mixed_lines,
    percent,
    row,
)
from tests.gpu_suite.section import BANDWIDTH


def table(record: dict[str, Any]) -> str:
    """Ends without a line break. A rehearsal's has neither times nor rates nor shares."""
    lines = [*_head(record)]
    for section in record["sections"]:
        lines.append(f"{section['name']}: {section['status']}, {section['seconds']:.0f} s")
        lines += [f"  {line}" for result in section["results"] for line in _lines(result)]
    return "\n".join([*lines, *_faults(record)])


def _head(record: dict[str, Any]) -> Iterator[str]:
    versions = record["versions"]
    yield f"torch {versions['torch']}, triton {versions['triton']}, transformers {versions['transformers']}"
    if record["rehearsal"]:
        yield "a rehearsal in Triton's interpreter, on tiny shapes: what runs and what is right, no times"
        return
    gpu = record["gpu"]
    yield "unknown GPU" if gpu is None else f"{gpu['name']}, driver {gpu['driver_version']}"
    peaks, stated = record["peaks"], record["datasheet"]
    rates = [
        f"{value / 1e12:,.0f} TFLOP/s {name}{_stated(value, stated.get(name))}"
        for name, value in peaks.items()
        if name != BANDWIDTH
    ]
    if BANDWIDTH in peaks:
        rates.append(f"{peaks[BANDWIDTH] / 1e12:.2f} TB/s{_stated(peaks[BANDWIDTH], stated.get(BANDWIDTH))}")
    yield f"peaks of this run: {', '.join(rates) or 'not measured'}"
    yield "shares are of bounds by these peaks; [in brackets: by the datasheet's]"


def _stated(value: float, stated: float | None) -> str:
    return "" if stated is None else f" [{percent(value / stated)}]"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    kind = result["kind"]
    if kind == "tests":
        yield f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
        yield from (f"failed: {name}" for name in result["failed_tests"])
    elif kind == "kernel":
        yield row(f"{result['kernel']}, {result['size']}", _kernel(result))
    elif kind == "tiles":
        yield row(f"{result['kernel']}, {result['size']}, tiles {_tiles(result['tiles'])}", _tried(result))
    elif kind == "step":
        yield row(f"{result['phase']}, {result['size']}{result['codes']}", _step(result))
    elif kind == "workload":
        told = (
            f"{result['workload']}, {result['rows']} rows, {result['mean_output']:.0f} out, {result['model']}"
        )
        yield row(told, f"{result['ops']} operators, {_workload(result)}")
        yield from launch_lines(result)
    elif kind == "profile":
        yield row(f"{result['steps']} steady steps, {result['model']}", _profile(result))
        yield from _kernels(result)
    elif kind in ("mixed", "host", "memory"):
        yield from {"mixed": mixed_lines, "host": host_lines, "memory": memory_lines}[kind](result)


def _kernel(result: dict[str, Any]) -> str:
    if result["ours"] is None:
        beside = f", beside {' and '.join(result['others'])}" if result["others"] else ""
        return f"right to {result['error']:.1g}{beside}"
    parts = [duration(result["ours"]["median_s"])]
    if "share" in result:
        share = f"{percent(result['share'])}{_by_datasheet(result)}"
        parts.append(f"{share} of its {result['bound_by']} bound{_aim(result['target'])}")
    for name, times in result["times_as_fast"].items():
        aim = f" (aim {result['aim'][name]:.0f}×)" if name in result["aim"] else ""
        parts.append(f"{times:.2f}× {name}{aim}")
    return ", ".join(parts)


def _by_datasheet(result: dict[str, Any]) -> str:
    share = result.get("datasheet_share")
    return "" if share is None else f" [{percent(share)}]"


def _tiles(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _tried(result: dict[str, Any]) -> str:
    if not result["fits"]:
        return "does not fit"
    same = ", which is chosen" if result["tiles"] == result["chosen"] else ""
    return f"{_kernel(result)}{same}"


def _aim(target: float | None) -> str:
    return "" if target is None else f" (aim {percent(target)})"


def _step(result: dict[str, Any]) -> str:
    if result["ours"] is None:
        return "ran"
    parts = [duration(result["ours"]["median_s"])]
    if "mbu" in result:
        parts += [
            f"MBU {percent(result['mbu'])}{_aim(result.get('mbu_target'))}",
            f"MFU {percent(result['mfu'])}",
        ]
        parts += [
            f"roofline {percent(result['roofline_efficiency'])}{_by_datasheet(result)}",
            f"{result['tokens_per_s']:,.0f} tokens/s",
        ]
    return ", ".join(parts)


def _workload(result: dict[str, Any]) -> str:
    if "wall_s" not in result:
        return f"ran in {result['steps']} steps"
    parts = [f"{result['wall_s']['median']:.2f} s", f"{result['output_tokens_per_s']:,.0f} output tokens/s"]
    parts += [f"roofline {percent(result['roofline_efficiency'])}", f"MFU {percent(result['mfu'])}"]
    if "against" in result:
        other = result["against"]
        parts.append(
            f"{1 / other['relative']:.2f}× {other['name']} {other['version']} (aim {result['aim']:.0f}×)"
        )
    return ", ".join(parts)


def _profile(result: dict[str, Any]) -> str:
    found = result["profiled"]
    if found is None:
        return "ran"
    before = result["unprofiled_step_s"]["median"]
    parts = [f"the GPU idles {percent(found['idle_share'])} of {duration(found['span_s'])}"]
    parts += [f"in {found['gaps']} gaps of up to {duration(max(found['longest_gaps_s'], default=0.0))}"]
    parts += [f"a step {duration(result['step_s']['median'])}, {duration(before)} without the profiler"]
    return ", ".join(parts)


def _kernels(result: dict[str, Any]) -> Iterator[str]:
    for kernel in [] if result["profiled"] is None else result["profiled"]["kernels"]:
        yield f"  {percent(kernel['share'])} of the device's work: {kernel['name'][:WIDTH]}"


def _faults(record: dict[str, Any]) -> Iterator[str]:
    for section in record["sections"]:
        for failure in section["failures"]:
            yield f"FAILED {section['name']}: {failure['what']}: {failure['message'].splitlines()[0]}"
        if section["out_of_time"]:
            yield f"OUT OF TIME {section['name']}: {section['out_of_time']}"
