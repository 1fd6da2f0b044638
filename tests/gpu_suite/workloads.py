"""The bench workloads on the 8B shape: the whole job, planning included, against what the hardware must take."""

from __future__ import annotations

from functools import partial
from typing import Any

from batchinfer.bench.ideal import ideal_job
from batchinfer.bench.report import Series, WorkloadResult
from batchinfer.bench.runs import timed_run
from batchinfer.bench.workloads import Row, Workload, make_workload
from batchinfer.models.shapes import shape_config
from tests.gpu_suite.loaded import loaded_model, model_name, peaks
from tests.gpu_suite.order import plan_in_memory
from tests.gpu_suite.section import Section

# `mixed` has a target, and is what others are compared on.
NAMES = ("mixed", "shared-prefix", "decode")
MOST_TURNS = 5
TINY_ROWS, TINY_PROMPT, TINY_OUTPUT = 2, 12, 3


def run(section: Section) -> None:
    """A result a workload; its turns are as many as the time allows, up to five."""
    names = NAMES[:1] if section.setting.rehearsal else NAMES
    waiting = len(names)
    for name in names:
        section.parts([(name, partial(_workload, section, name, section.left_s / waiting))])
        waiting -= 1


def suite_workload(section: Section, name: str) -> Workload:
    """In its own size, and of two short rows in a rehearsal."""
    vocab = shape_config(model_name(section.setting)).vocab
    if not section.setting.rehearsal:
        return make_workload(name, vocab)
    rows = make_workload(name, vocab, TINY_ROWS).rows
    return Workload(name, tuple(Row(row.prompt[:TINY_PROMPT], TINY_OUTPUT) for row in rows))


def _workload(section: Section, name: str, seconds: float) -> dict[str, Any]:
    loaded, workload, series = loaded_model(section.setting), suite_workload(section, name), Series()
    ends = section.left_s - seconds
    longest = timed_run(loaded, workload.rows, planner=plan_in_memory).wall_s  # compiles and captures
    for turn in range(1 if section.setting.rehearsal else MOST_TURNS):
        if turn and section.left_s - longest < ends:
            break
        series.ours.append(timed_run(loaded, workload.rows, planner=plan_in_memory))
        longest = series.ours[-1].wall_s
    return told(section, workload, series)


def told(section: Section, workload: Workload, series: Series, peer: str | None = None) -> dict[str, Any]:
    """As `batchinfer bench` tells it; of a rehearsal what does not depend on time."""
    loaded = loaded_model(section.setting)
    result = {"kind": "workload", "workload": workload.name, "ops": loaded.info.ops}
    if section.setting.rehearsal:
        return {**result, "rows": len(workload.rows), "steps": len(series.ours[0].steps)}
    ideal = ideal_job(workload.rows, loaded.runner.layout.windows)
    whole = WorkloadResult(workload, ideal, series)
    return {**result, **whole.to_json(loaded.runner.cost, peaks(section.setting), peer)}
