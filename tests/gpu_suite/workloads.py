"""Workloads in their steady state: whole jobs, planning included, against what the hardware must take.

Thousands of rows and short answers: rows come and go in nearly every step, as they do in most of a long job.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from batchinfer.bench.ideal import ideal_job
from batchinfer.bench.report import Series, WorkloadResult
from batchinfer.bench.runs import timed_run
from batchinfer.bench.workloads import Row, Workload
from batchinfer.core.request import Request
from batchinfer.core.samples import LAUNCH_MODES, StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.models.checkpoint.shapes import shape_config
from tests.gpu_suite.loaded import loaded_model, memory, model_name, peaks
from tests.gpu_suite.order import plan_in_memory
from tests.gpu_suite.section import Section

ROWS, TINY_ROWS = 2000, 3
PROMPT, SHARED = 512, 448  # tokens; those that all rows of the second workload share
MEAN_OUTPUT, MOST_OUTPUT = 128, 512
SHORT_OUTPUT = 32  # on average, where prompts are shared: most of the work is reading the prompt otherwise
TINY_PROMPT, TINY_OUTPUT = 12, 3
MOST_TURNS = 3
FIRST_ID = 300  # special tokens lie below in most vocabularies


def run(section: Section) -> None:
    """A result a workload, after a run that does not count; its turns are as many as the time allows, up to three. The
    shortest workload first: what it leaves over goes to the other."""
    workloads = made(section)[::-1]
    waiting = len(workloads)
    for workload in workloads:
        part = partial(_measured, section, workload, section.left_s / waiting)
        section.parts([(workload.name, part)])
        waiting -= 1
    section.parts([("memory", partial(memory, section.setting))])


def made(section: Section) -> list[Workload]:
    """Rows that share nothing, and rows that share most of their prompt."""
    vocab = shape_config(model_name(section.setting)).vocab
    if section.setting.rehearsal:
        return [Workload("steady", steady_rows(TINY_ROWS, vocab, TINY_PROMPT, TINY_OUTPUT, TINY_OUTPUT))]
    plain = steady_rows(ROWS, vocab, PROMPT, MEAN_OUTPUT, MOST_OUTPUT)
    shared = steady_rows(ROWS, vocab, PROMPT, SHORT_OUTPUT, MOST_OUTPUT, SHARED)
    return [Workload("steady", plain), Workload("steady, shared prefix", shared)]


def requests(section: Section) -> list[Request]:
    """The rows that share nothing, for an engine that is stepped by hand."""
    return [
        Request(
            number.to_bytes(32, "big"),
            np.array(row.prompt, np.int32),
            SamplingParams(max_tokens=row.max_tokens, ignore_eos=True),
        )
        for number, row in enumerate(made(section)[0].rows)
    ]


def steady_rows(
    rows: int, vocab: int, prompt: int, output: int, most: int, shared: int = 0
) -> tuple[Row, ...]:
    """Answers' lengths are drawn from an exponential distribution, and cut at `most`: `output` on average at most."""
    r = random.Random(rows + shared)
    prefix = _ids(r, shared, vocab)
    lengths = [1 + min(int(r.expovariate(1 / output)), most - 1) for _ in range(rows)]
    return tuple(Row(prefix + _ids(r, prompt - shared, vocab), length) for length in lengths)


def _ids(r: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(r.randrange(FIRST_ID, vocab) for _ in range(count))


def _measured(section: Section, workload: Workload, seconds: float) -> dict[str, Any]:
    loaded, series = loaded_model(section.setting), Series()
    ends = section.left_s - seconds
    longest = timed_run(loaded, workload.rows, planner=plan_in_memory).wall_s  # compiles and captures
    for turn in range(1 if section.setting.rehearsal else MOST_TURNS):
        if turn and section.left_s - longest < ends:
            break
        series.ours.append(timed_run(loaded, workload.rows, planner=plan_in_memory))
        longest = series.ours[-1].wall_s
    return told(section, workload, series)


def told(section: Section, workload: Workload, series: Series, peer: str | None = None) -> dict[str, Any]:
    """Return the result as `batchinfer bench` tells it."""
    loaded = loaded_model(section.setting)
    result: dict[str, Any] = {"kind": "workload", "workload": workload.name, "ops": loaded.info.ops}
    result |= {"model": model_name(section.setting), "mean_output": mean_output(workload.rows)}
    result |= launched(series.ours[-1].steps)
    result["steps"] = len(series.ours[0].steps)
    ideal = ideal_job(workload.rows, loaded.runner.layout.windows)
    whole = WorkloadResult(workload, ideal, series)
    return {**result, **whole.to_json(loaded.runner.cost, peaks(section.setting), peer)}


def launched(steps: Iterable[StepSample]) -> dict[str, Any]:
    """Numbers and shares of steps, and of tokens in them, by how the host launched them, as a job's report has them."""
    found: dict[str, float | None] = {}
    each = [(step.launch, step.prefill_tokens + step.decode_tokens) for step in steps if step.launch]
    for unit, numbers in (("steps", [1] * len(each)), ("tokens", [tokens for _, tokens in each])):
        for mode in LAUNCH_MODES:
            number = sum(n for n, (launch, _) in zip(numbers, each, strict=True) if launch == mode)
            found[f"{mode}_{unit}"] = number if each else None
            found[f"{mode}_{unit}_share"] = number / sum(numbers) if each else None
    return {"launched": found}


def mean_output(rows: Sequence[Row]) -> float:
    """Tokens."""
    return sum(row.max_tokens for row in rows) / len(rows)
