"""The record as a short table: one line per result, failures last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tests.suite.section import BANDWIDTH

WIDTH = 58  # width of the first column


def table(record: dict[str, Any]) -> str:
    """Return lines without a trailing newline. A rehearsal has no times, rates and shares."""
    lines = [*_head(record)]
    for section in record["sections"]:
        lines.append(f"{section['name']}: {section['status']}, {section['seconds']:.0f} s")
        lines += [f"  {line}" for result in section["results"] for line in _lines(result)]
    return "\n".join([*lines, *_faults(record)])


def _head(record: dict[str, Any]) -> Iterator[str]:
    versions = record["versions"]
    yield f"torch {versions['torch']}, triton {versions['triton']}, transformers {versions['transformers']}"
    if record["rehearsal"]:
        yield "a rehearsal on tiny shapes: errors are found, times are not measured"
        return
    gpu = record["gpu"]
    if gpu is None:
        yield f"{record['cpu']['name']}, {record['cpu']['cores']} cores"
        return
    yield f"{gpu['name']}, driver {gpu['driver_version']}"
    rates = [_peak(name, value, record["datasheet"].get(name)) for name, value in record["peaks"].items()]
    yield f"peaks of this run: {', '.join(rates) or 'not measured'}"
    yield "shares are of bounds by these peaks; [in brackets: by the datasheet's]"


def _peak(name: str, value: float, stated: float | None) -> str:
    rate = f"{value / 1e12:.2f} TB/s" if name == BANDWIDTH else f"{value / 1e12:,.0f} TFLOP/s {name}"
    return rate + ("" if stated is None else f" [{100 * value / stated:.0f} %]")


def _lines(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result's line, and one for each metric that is a nested table."""
    facts, metrics = result["facts"], result.get("metrics", {})
    is_timed = "metrics" in result
    kinds = (int, str) if is_timed else (int, float, str)
    told = [named(name, value) for name, value in facts.items() if isinstance(value, kinds)]
    told += _shares(result) if is_timed else []
    for name, value in metrics.items():
        if isinstance(value, int | float | str):
            told.append(named(name, value) + _aim(result["targets"].get(name)))
    told += [f"beside {' and '.join(result['beside'])}"] if result.get("beside") else []
    yield f"{result['name']:<{WIDTH}} {', '.join(told) or 'ran'}"
    for name, values in metrics.items():
        if isinstance(values, Mapping):
            yield from (f"  {named(name, value)}: {key[:WIDTH]}" for key, value in values.items())


def _shares(result: dict[str, Any]) -> Iterator[str]:
    """Yield the metrics that follow from a result's times."""
    if not result["times"]:
        return
    found, targets = result["shares"], result["targets"]
    yield duration(next(iter(result["times"].values()))["median_s"])
    if "share" in found:
        sheet = found["datasheet_share"]
        stated = "" if sheet is None else f" [{100 * sheet:.0f} %]"
        yield f"{100 * found['share']:.0f} %{stated} of its {found['bound_by']} bound{_aim(targets.get('share'))}"
    if "tokens_per_s" in found:
        yield f"MBU {100 * found['mbu']:.0f} %{_aim(targets.get('mbu'))}, MFU {100 * found['mfu']:.0f} %"
        yield f"{found['tokens_per_s']:,.0f} tokens/s"
    for name, times in found["times_as_fast"].items():
        aim = f" (aim {targets[name]:.0f}×)" if name in targets else ""
        yield f"{times:.2f}× {name}{aim}"


def _aim(target: float | None) -> str:
    return "" if target is None else f" (aim {100 * target:.0f} %)" if target < 1 else f" (aim {target:.0f})"


def named(name: str, value: float | str) -> str:
    """Return a metric with the unit of its name: `launch_layer_s` is a time."""
    what, _, unit = name.rpartition("_")
    spoken = what.replace("_", " ")
    if isinstance(value, str):
        return f"{name} {value}"
    if name.endswith("_per_s"):
        return f"{value:,.0f} {name.removesuffix('_per_s').replace('_', ' ')}/s"
    if unit == "s":
        return f"{spoken} {duration(value)}"
    if unit in ("share", "efficiency") or name in ("mfu", "mbu"):
        return f"{spoken or name} {100 * value:.0f} %"
    if unit == "bytes":
        return f"{spoken} {value / 2**20:,.0f} MiB"
    return f"{name.replace('_', ' ')} " + (f"{value:,}" if isinstance(value, int) else f"{value:.3g}")


def duration(seconds: float) -> str:
    """Return a time in microseconds, milliseconds or seconds."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-2 else f"{seconds * 1e3:,.1f} ms"


def _faults(record: dict[str, Any]) -> Iterator[str]:
    for section in record["sections"]:
        for failure in section["failures"]:
            yield f"FAILED {section['name']}: {failure['what']}: {failure['message'].splitlines()[0]}"
        if section["out_of_time"]:
            yield f"OUT OF TIME {section['name']}: {section['out_of_time']}"
