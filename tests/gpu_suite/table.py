"""The record for people: short, a line a result, what failed last."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.gpu_suite.section import BANDWIDTH

WIDTH = 58  # of the first column


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
    return "" if stated is None else f" [{_percent(value / stated)}]"


def _lines(result: dict[str, Any]) -> Iterator[str]:
    kind = result["kind"]
    if kind == "tests":
        yield f"{result['passed']} passed, {result['failed']} failed, {result['skipped']} skipped"
        yield from (f"failed: {name}" for name in result["failed_tests"])
    elif kind == "kernel":
        yield _row(f"{result['kernel']}, {result['size']}", _kernel(result))
    elif kind == "tiles":
        yield _row(f"{result['kernel']}, {result['size']}, tiles {_tiles(result['tiles'])}", _tried(result))
    elif kind == "step":
        yield _row(f"{result['phase']}, {result['size']}", _step(result))
    elif kind == "workload":
        told = (
            f"{result['workload']}, {result['rows']} rows, {result['mean_output']:.0f} out, {result['model']}"
        )
        yield _row(told, f"{result['ops']} operators, {_workload(result)}")
    elif kind == "profile":
        yield _row(f"{result['steps']} steady steps, {result['model']}", _profile(result))
        yield from _kernels(result)


def _row(name: str, rest: str) -> str:
    return f"{name:<{WIDTH}} {rest}"


def _kernel(result: dict[str, Any]) -> str:
    if result["ours"] is None:
        beside = f", beside {' and '.join(result['others'])}" if result["others"] else ""
        return f"right to {result['error']:.1g}{beside}"
    parts = [_time(result["ours"]["median_s"])]
    if "share" in result:
        share = f"{_percent(result['share'])}{_by_datasheet(result)}"
        parts.append(f"{share} of its {result['bound_by']} bound{_aim(result['target'])}")
    for name, times in result["times_as_fast"].items():
        aim = f" (aim {result['aim'][name]:.0f}×)" if name in result["aim"] else ""
        parts.append(f"{times:.2f}× {name}{aim}")
    return ", ".join(parts)


def _by_datasheet(result: dict[str, Any]) -> str:
    share = result.get("datasheet_share")
    return "" if share is None else f" [{_percent(share)}]"


def _tiles(sizes: Sequence[int]) -> str:
    return f"({', '.join(map(str, sizes))})"


def _tried(result: dict[str, Any]) -> str:
    if not result["fits"]:
        return "does not fit"
    same = ", which is chosen" if result["tiles"] == result["chosen"] else ""
    return f"{_kernel(result)}{same}"


def _aim(target: float | None) -> str:
    return "" if target is None else f" (aim {_percent(target)})"


def _step(result: dict[str, Any]) -> str:
    if result["ours"] is None:
        return "ran"
    parts = [_time(result["ours"]["median_s"])]
    if "mbu" in result:
        parts += [
            f"MBU {_percent(result['mbu'])}{_aim(result.get('mbu_target'))}",
            f"MFU {_percent(result['mfu'])}",
        ]
        parts += [
            f"roofline {_percent(result['roofline_efficiency'])}{_by_datasheet(result)}",
            f"{result['tokens_per_s']:,.0f} tokens/s",
        ]
    return ", ".join(parts)


def _workload(result: dict[str, Any]) -> str:
    if "wall_s" not in result:
        return f"ran in {result['steps']} steps"
    parts = [f"{result['wall_s']['median']:.2f} s", f"{result['output_tokens_per_s']:,.0f} output tokens/s"]
    parts += [f"roofline {_percent(result['roofline_efficiency'])}", f"MFU {_percent(result['mfu'])}"]
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
    parts = [f"the GPU idles {_percent(found['idle_share'])} of {_time(found['span_s'])}"]
    parts += [f"in {found['gaps']} gaps of up to {_time(max(found['longest_gaps_s'], default=0.0))}"]
    parts += [f"a step {_time(result['step_s']['median'])}, {_time(before)} without the profiler"]
    return ", ".join(parts)


def _kernels(result: dict[str, Any]) -> Iterator[str]:
    for kernel in [] if result["profiled"] is None else result["profiled"]["kernels"]:
        yield f"  {_percent(kernel['share'])} of the device's work: {kernel['name'][:WIDTH]}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _faults(record: dict[str, Any]) -> Iterator[str]:
    for section in record["sections"]:
        for failure in section["failures"]:
            yield f"FAILED {section['name']}: {failure['what']}: {failure['message'].splitlines()[0]}"
        if section["out_of_time"]:
            yield f"OUT OF TIME {section['name']}: {section['out_of_time']}"
