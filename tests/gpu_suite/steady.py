"""Workloads in their steady state: whole jobs including planning, compared with the roofline.

Thousands of rows with short answers: rows start and end in nearly every step, as in most of a long job.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np

from batchinfer.bench.ideal import ideal_job
from batchinfer.bench.report import Series, WorkloadResult
from batchinfer.bench.runs import timed_run
from batchinfer.bench.workloads import Row, Workload
from batchinfer.core.request import Request
from batchinfer.core.samples import LAUNCH_MODES, StepSample
from batchinfer.core.sampling import SamplingParams
from batchinfer.models.checkpoint.shapes import shape_config
from tests.gpu_suite.loaded import loaded_model, memory, model_name, name_of, peaks
from tests.gpu_suite.order import plan_in_memory
from tests.suite.section import BenchSection, Part, Result
from tests.suite.turns import in_turns

ROWS, TINY_ROWS = 2000, 3
PROMPT, SHARED = 512, 448  # prompt tokens; shared tokens in the second workload
MEAN_OUTPUT, MOST_OUTPUT = 128, 512
SHORT_OUTPUT = 32  # mean output with shared prompts: otherwise prefill dominates
TINY_PROMPT, TINY_OUTPUT = 12, 3
MOST_TURNS = 3
SHOWN = ("output_tokens_per_s", "roofline_efficiency", "mfu", "mbu")
FIRST_ID = 300  # most vocabularies have their special tokens below


def parts(section: BenchSection) -> list[Part]:
    """Return a part per workload, each timed after a warm-up with up to three repetitions, and a part for
    memory.

    The shortest workload is first: the other one gets the time that it leaves.
    """
    workloads = made(section)[::-1]
    waiting = range(len(workloads), 0, -1)
    timed = [(w.name, partial(_measured, section, w, n)) for w, n in zip(workloads, waiting, strict=True)]
    return [*timed, ("memory", partial(memory, section))]


def made(section: BenchSection) -> list[Workload]:
    """Return rows that share no prefix, and rows that share most of their prompt."""
    vocab = shape_config(model_name(section)).vocab
    if section.rehearsal:
        return [Workload("steady", steady_rows(TINY_ROWS, vocab, TINY_PROMPT, TINY_OUTPUT, TINY_OUTPUT))]
    plain = steady_rows(ROWS, vocab, PROMPT, MEAN_OUTPUT, MOST_OUTPUT)
    shared = steady_rows(ROWS, vocab, PROMPT, SHORT_OUTPUT, MOST_OUTPUT, SHARED)
    return [Workload("steady", plain), Workload("steady, shared prefix", shared)]


def requests(section: BenchSection) -> list[Request]:
    """Return the requests that share no prefix, for an engine stepped by hand."""
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
    """Return rows whose answer lengths are exponential with mean `output`, truncated at `most`."""
    r = random.Random(rows + shared)
    prefix = _ids(r, shared, vocab)
    lengths = [1 + min(int(r.expovariate(1 / output)), most - 1) for _ in range(rows)]
    return tuple(Row(prefix + _ids(r, prompt - shared, vocab), length) for length in lengths)


def _ids(r: random.Random, count: int, vocab: int) -> tuple[int, ...]:
    return tuple(r.randrange(FIRST_ID, vocab) for _ in range(count))


def _measured(section: BenchSection, workload: Workload, waiting: int) -> Result:
    """Run a workload in turns. The remaining time is divided among `waiting` workloads."""
    loaded, ends = loaded_model(section), section.left_s * (1 - 1 / waiting)
    run = partial(timed_run, loaded, workload.rows, planner=plan_in_memory)
    run()  # compiles and captures
    turns = 1 if section.rehearsal else MOST_TURNS
    found = in_turns({"ours": lambda _: run()}, turns, lambda: section.left_s - ends)
    return told(section, workload, Series(found["ours"]))


def told(section: BenchSection, workload: Workload, series: Series, peer: str | None = None) -> Result:
    """Return the result with the metrics of `batchinfer bench`, all of them in its details."""
    loaded = loaded_model(section)
    whole = WorkloadResult(workload, ideal_job(workload.rows, loaded.runner.layout.windows), series)
    details = whole.to_json(loaded.runner.cost, peaks(section), peer)
    metrics = {"wall_s": details["wall_s"]["median"], **{name: details[name] for name in SHOWN}}
    metrics |= launched(series.ours[-1].steps)
    if peer is not None:
        metrics[f"times as fast as {peer}"] = 1 / details["against"]["relative"]
    name = f"{workload.name}, {len(workload.rows)} rows, {mean_output(workload.rows):.0f} out, {name_of(section)}"
    facts = {"operators": loaded.info.ops, "steps": len(series.ours[0].steps)}
    return Result(name, facts, metrics=metrics, details=details)


def launched(steps: Iterable[StepSample]) -> dict[str, float]:
    """Return the share of steps per way of launching."""
    modes = Counter(step.launch for step in steps if step.launch)
    return {f"{mode}_share": modes[mode] / modes.total() for mode in LAUNCH_MODES if modes}


def mean_output(rows: Sequence[Row]) -> float:
    """Return the mean number of tokens per answer."""
    return sum(row.max_tokens for row in rows) / len(rows)
