"""Tests that docs/performance.md and README.md quote the recorded measurement."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[3]
MEASUREMENTS = ROOT / "docs" / "measurements"
RECORD = json.loads((MEASUREMENTS / "cpu-2026-11-21.json").read_text("utf-8"))
AVX2 = json.loads((MEASUREMENTS / "cpu-2026-11-28.json").read_text("utf-8"))
OURS, OPENVINO, VLLM = "batchinfer 0.1.0", "OpenVINO GenAI 2026.4.1", "vLLM 0.32 (CPU)"


WORKLOADS = ("shared-prefix", "mixed", "decode")
PAGE = (ROOT / "docs" / "performance.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def values(record: dict, engine: str, dtype: str, workload: str, key: str = "seconds") -> list[float]:
    """Return a metric of all runs of a record."""
    place = (engine, dtype, workload)
    return [r[key] for r in record["runs"] if (r["engine"], r["dtype"], r["workload"]) == place]


def typical(engine: str, dtype: str, workload: str, key: str = "seconds") -> float:
    found = values(RECORD, engine, dtype, workload, key)
    assert len(found) >= 3
    return median(found)


def cells(workload: str) -> list[str]:
    """Return the cells of a workload as the first table of the page shows them."""
    vllm, openvino = (typical(engine, "bfloat16", workload) for engine in (VLLM, OPENVINO))
    row = [f"{vllm:.1f} s", f"{openvino:.1f} s"]
    for dtype in ("bfloat16", "int8"):
        ours = typical(OURS, dtype, workload)
        share = typical(OURS, dtype, workload, "roofline_efficiency")
        row += [f"{ours:.1f} s", f"{ours / min(vllm, openvino):.2f}", f"{share:.0%}"]
    return row


def row_of(page: str, workload: str) -> list[str]:
    found = re.search(rf"(?m)^\| `{workload}`[^|]*\|(.*s.*)\|$", page)
    assert found is not None
    return [cell.strip() for cell in found[1].split("|")]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_tables_are_those_of_the_record(workload):
    wanted = cells(workload)
    assert row_of(PAGE, workload) == wanted
    assert row_of(README, workload) == [wanted[0], wanted[1], wanted[2], wanted[5]]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_table_of_avx2_is_that_of_its_record(workload):
    openvino, ours = (values(AVX2, engine, "float32", workload) for engine in (OPENVINO, OURS))
    other, coded = (values(AVX2, engine, "int8", workload) for engine in (OPENVINO, OURS))
    ratios = [mine / theirs for mine, theirs in zip(ours, openvino, strict=True)]
    shares, coded_shares = (
        values(AVX2, OURS, dtype, workload, "roofline_efficiency") for dtype in ("float32", "int8")
    )
    assert row_of(PAGE[PAGE.index("## On AVX2") :], workload) == [
        f"{median(openvino):.1f} s",
        f"{median(ours):.1f} s",
        f"{median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})",
        f"{median(shares):.0%}"[:-1] + " %",
        *(f"{taken:.1f} s" for taken in other),
        f"{median(coded):.1f} s",
        f"{median(coded_shares):.0%}"[:-1] + " %",
    ]
    said = re.search(r"both in float32, ([\d.]+), ([\d.]+) and ([\d.]+)\.", README)
    assert said is not None
    assert said[1 + WORKLOADS.index(workload)] == f"{median(ratios):.2f}"


def test_what_deduplication_saves_is_that_of_the_record():
    took, other = (median(RECORD["duplicates"][name]) for name in ("seconds", "without_deduplication"))
    found = re.search(
        r"takes ([\d.]+) s, and ([\d.]+) s without deduplication \(([\d.]+) times", " ".join(PAGE.split())
    )
    assert found is not None
    assert found.groups() == (f"{took:.1f}", f"{other:.1f}", f"{took / other:.2f}")
