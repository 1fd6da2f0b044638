"""What was reached of what this GPU reaches: bounds by the peaks of the same run, and times beside others'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import Cost, Peaks
from tests.gpu_suite.section import BANDWIDTH

# What a workload's result says in a rehearsal
UNTIMED = ("kind", "workload", "model", "ops", "mean_output", "launched", "rows", "steps")


def with_shares(record: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """The record with `peaks`, what the GPU's maker states (`datasheet`), and in each timed result its bounds by both
    and what follows from them. A rehearsal's record claims nothing: it has none of these, and no times."""
    stated = stated_peaks(record)
    told = untimed if record["rehearsal"] else partial(_told, peaks=peaks, stated=stated)
    sections = [
        {**section, "results": [told(result) for result in section["results"]]}
        for section in record["sections"]
    ]
    return {
        **record,
        "peaks": {} if record["rehearsal"] else dict(peaks),
        "datasheet": stated,
        "sections": sections,
    }


def untimed(result: dict[str, Any]) -> dict[str, Any]:
    """Return a result without what depends on the time that anything took."""
    match result["kind"]:
        case "kernel" | "tiles":
            return {**result, "ours": None, "others": dict.fromkeys(result["others"])}
        case "step":
            return {**result, "ours": None}
        case "host":
            return {**result, "host": None}
        case "peaks":
            return {**result, "peaks": {}}
        case "mixed":
            return {**result, "ways": dict.fromkeys(result["ways"]), "assumed_layer_s": None}
        case "profile":
            return {"kind": "profile", "model": result["model"], "steps": result["steps"], "profiled": None}
        case "workload":
            return {name: result[name] for name in UNTIMED}
    return result


def stated_peaks(record: dict[str, Any]) -> dict[str, float]:
    """What the GPU's datasheet states, named as in `peaks`; empty where the GPU is not known, or nothing is timed."""
    sheet = datasheet(record["gpu"]["name"]) if record["gpu"] is not None else None
    return {} if sheet is None else {**sheet.peak_flops, BANDWIDTH: sheet.bandwidth}


def _told(result: dict[str, Any], peaks: Mapping[str, float], stated: Mapping[str, float]) -> dict[str, Any]:
    if result.get("ours") is None:
        return result
    if result["kind"] in ("kernel", "tiles"):
        return {**result, **_kernel(result, peaks, stated)}
    return {**result, **_step(result, peaks, stated)} if result["kind"] == "step" else result


def peaks_for(dtype: str, peaks: Mapping[str, float], codes: str = "int8") -> Peaks | None:
    """`codes`: the dtype of products of codes. None where something was not measured."""
    if dtype not in peaks or BANDWIDTH not in peaks:
        return None
    return Peaks(peaks[dtype], peaks[BANDWIDTH], peaks.get(codes))


def _kernel(
    result: dict[str, Any], peaks: Mapping[str, float], stated: Mapping[str, float]
) -> dict[str, Any]:
    """`share` of the bound by measured peaks that was reached, `datasheet_share` of that by stated ones;
    `times_as_fast` as each of the others."""
    taken, found = result["ours"]["median_s"], peaks_for(result["dtype"], peaks)
    others = {name: times["median_s"] / taken for name, times in result["others"].items()}
    told: dict[str, Any] = {"times_as_fast": others}
    if found is None:
        return told
    cost = Cost(result["flops"], result["bytes"], result["int8_ops"])
    bound = cost.seconds(found)
    by = "memory" if cost.bytes / found.bytes_per_s == bound else "compute"
    rates = {"flops_per_s": cost.flops / taken, "bytes_per_s": cost.bytes / taken}
    shares = {"share": bound / taken, **_of_the_datasheet([cost], taken, peaks_for(result["dtype"], stated))}
    return {**told, "bound_s": bound, "bound_by": by, **shares, **rates}


def _step(result: dict[str, Any], peaks: Mapping[str, float], stated: Mapping[str, float]) -> dict[str, Any]:
    """`roofline_efficiency` as the report of a job has it, by measured peaks, `datasheet_share` the same by stated
    ones; `mbu` and `mfu` of the same step."""
    taken, dtypes = result["ours"]["median_s"], (result["dtype"], result["codes_dtype"])
    found, sheet = (peaks_for(dtypes[0], known, dtypes[1]) for known in (peaks, stated))
    if found is None:
        return {}
    costs = [Cost(*cost) for cost in result["operators"].values()]
    total = sum(costs, Cost())
    bound = sum(cost.seconds(found) for cost in costs)
    return {
        "bound_s": bound,
        "roofline_efficiency": bound / taken,
        **_of_the_datasheet(costs, taken, sheet),
        "mbu": total.bytes / (taken * found.bytes_per_s),
        "mfu": total.flops / (taken * found.flops_per_s),
        "tokens_per_s": result["tokens"] / taken,
    }


def _of_the_datasheet(costs: Sequence[Cost], taken: float, stated: Peaks | None) -> dict[str, float | None]:
    bound = None if stated is None else sum(cost.seconds(stated) for cost in costs)
    return {"datasheet_share": None if bound is None else bound / taken}
