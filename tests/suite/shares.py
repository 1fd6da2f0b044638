"""Computes shares of this GPU's peaks: bounds by the peaks of the run, and times relative to others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchinfer.machine.datasheet import datasheet
from batchinfer_kernels.cost import Cost, Peaks
from tests.suite.section import BANDWIDTH

UNTIMED = ("name", "facts", "targets")  # keys of a result that a rehearsal keeps
Result = dict[str, Any]


def with_shares(record: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return the record with `peaks`, the GPU maker's numbers (`datasheet`), and `shares` of each timed
    result.

    `shares` has the bounds by both, and ratios. A rehearsal's record has none of these, and no times.
    """
    rehearsal, sheet = record["rehearsal"], stated_peaks(record)

    def told(result: Result) -> Result:
        if rehearsal:
            return {**{name: result[name] for name in UNTIMED}, "beside": list(result["times"])[1:]}
        return {**result, "shares": shares(result, peaks, sheet)} if result["times"] else result

    sections = [
        {**section, "results": [told(result) for result in section["results"]]}
        for section in record["sections"]
    ]
    return {**record, "peaks": {} if rehearsal else dict(peaks), "datasheet": sheet, "sections": sections}


def stated_peaks(record: dict[str, Any]) -> dict[str, float]:
    """Return what the GPU's datasheet states, named as in `peaks`; empty where no GPU is known."""
    sheet = datasheet(record["gpu"]["name"]) if record["gpu"] is not None else None
    return {} if sheet is None else {**sheet.peak_flops, BANDWIDTH: sheet.bandwidth}


def shares(result: Result, peaks: Mapping[str, float], stated: Mapping[str, float]) -> dict[str, Any]:
    """Return `share`, the roofline by measured peaks ÷ the time, and `datasheet_share`, by stated peaks; `mbu` and
    `mfu`; and the speedup over each of the others.

    The roofline is the sum over operators.
    """
    ours, *others = result["times"]
    taken = result["times"][ours]["median_s"]
    told: dict[str, Any] = {
        "times_as_fast": {name: result["times"][name]["median_s"] / taken for name in others}
    }
    found, sheet = (_peaks(result, known) for known in (peaks, stated))
    costs = [Cost(**cost) for cost in result["costs"].values()]
    if found is None or not costs:
        return told
    bound, total = sum(cost.seconds(found) for cost in costs), sum(costs, Cost())
    by_memory = sum(cost.bytes for cost in costs) / found.bytes_per_s >= (1 - 1e-9) * bound
    rates = {"flops_per_s": total.flops / taken, "bytes_per_s": total.bytes / taken}
    if result["tokens"] is not None:
        rates["tokens_per_s"] = result["tokens"] / taken
    return {
        **told,
        "bound_s": bound,
        "bound_by": "memory" if by_memory else "compute",
        "share": bound / taken,
        "datasheet_share": None if sheet is None else sum(cost.seconds(sheet) for cost in costs) / taken,
        "mbu": rates["bytes_per_s"] / found.bytes_per_s,
        "mfu": rates["flops_per_s"] / found.flops_per_s,
        **rates,
    }


def _peaks(result: Result, peaks: Mapping[str, float]) -> Peaks | None:
    """Return the peaks for a result's arithmetic, or None if one was not measured."""
    if result["dtype"] not in peaks or BANDWIDTH not in peaks:
        return None
    return Peaks(peaks[result["dtype"]], peaks[BANDWIDTH], peaks.get(result["codes_dtype"]))
