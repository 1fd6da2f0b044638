"""What was reached of what this GPU reaches: bounds by the peaks of the same run, and times beside others'."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer_kernels.cost import Cost, Peaks
from tests.gpu_suite.section import BANDWIDTH


def with_shares(record: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """The record with `peaks`, and in each timed result its bound and what follows from it. None in a rehearsal."""
    sections = [
        {**section, "results": [_told(result, peaks) for result in section["results"]]}
        for section in record["sections"]
    ]
    return {**record, "peaks": dict(peaks), "sections": sections}


def _told(result: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    if result.get("ours") is None:
        return result
    if result["kind"] == "kernel":
        return {**result, **_kernel(result, peaks)}
    return {**result, **_step(result, peaks)} if result["kind"] == "step" else result


def peaks_for(dtype: str, peaks: Mapping[str, float]) -> Peaks | None:
    """None where something was not measured."""
    if dtype not in peaks or BANDWIDTH not in peaks:
        return None
    return Peaks(peaks[dtype], peaks[BANDWIDTH], peaks.get("int8"))


def _kernel(result: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """`share` of the bound that was reached; `times_as_fast` as each of the others."""
    taken, found = result["ours"]["median_s"], peaks_for(result["dtype"], peaks)
    others = {name: times["median_s"] / taken for name, times in result["others"].items()}
    told: dict[str, Any] = {"times_as_fast": others}
    if found is None:
        return told
    cost = Cost(result["flops"], result["bytes"], result["int8_ops"])
    bound = cost.seconds(found)
    by = "memory" if cost.bytes / found.bytes_per_s == bound else "compute"
    rates = {"flops_per_s": cost.flops / taken, "bytes_per_s": cost.bytes / taken}
    return {**told, "bound_s": bound, "bound_by": by, "share": bound / taken, **rates}


def _step(result: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """`roofline_efficiency` as the report of a job has it; `mbu` and `mfu` of the same step."""
    taken, found = result["ours"]["median_s"], peaks_for(result["dtype"], peaks)
    if found is None:
        return {}
    costs = {name: Cost(*cost) for name, cost in result["operators"].items()}
    total = sum(costs.values(), Cost())
    bound = sum(cost.seconds(found) for cost in costs.values())
    return {
        "bound_s": bound,
        "roofline_efficiency": bound / taken,
        "mbu": total.bytes / (taken * found.bytes_per_s),
        "mfu": total.flops / (taken * found.flops_per_s),
        "tokens_per_s": result["tokens"] / taken,
    }
