"""The `mixed` workload compared with transformers' continuous batching, in turns, with equal weights on one device.

The workload is small enough for the other engine; workloads.py has larger ones for a steady state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from batchinfer.bench.report import Series
from batchinfer.bench.runs import timed_run
from batchinfer.bench.workloads import Row, Workload, make_workload
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import SHAPES, shape_config
from tests.gpu_suite.continuous import ContinuousPeer
from tests.gpu_suite.loaded import dtype_of, loaded_model, model_name, source
from tests.gpu_suite.order import plan_in_memory
from tests.gpu_suite.steady import MOST_TURNS, TINY_OUTPUT, TINY_PROMPT, told
from tests.suite.section import BenchSection, Part, Result, WrongResult
from tests.suite.turns import in_turns

WORKLOAD = "mixed"
TINY_CACHE = {"num_blocks": 8, "max_batch_tokens": 64}
AIM = 3.0  # speedup over continuous batching


def parts(section: BenchSection) -> list[Part]:
    """Return the single part, with up to three repetitions if time allows."""
    return [(WORKLOAD, partial(_against, section))]


def mixed(section: BenchSection) -> Workload:
    """Return the workload in its usual size, or two short rows in a rehearsal."""
    vocab = shape_config(model_name(section)).vocab
    if not section.rehearsal:
        return make_workload(WORKLOAD, vocab)
    rows = make_workload(WORKLOAD, vocab, 2).rows
    return Workload(WORKLOAD, tuple(Row(row.prompt[:TINY_PROMPT], TINY_OUTPUT) for row in rows))


def _against(section: BenchSection) -> Result:
    loaded, workload = loaded_model(section), mixed(section)
    dtype, spec = dtype_of(section), source(section).spec
    weights = DummyWeights(spec, getattr(torch, dtype), section.device)
    cache = TINY_CACHE if section.rehearsal else None
    peer = ContinuousPeer(SHAPES[model_name(section)], weights, section.device, dtype, cache)
    ours = partial(timed_run, loaded, workload.rows, planner=plan_in_memory)
    ways: dict[str, Callable[[int], Any]] = {
        "ours": lambda _: ours(),
        "peer": lambda _: peer.run(workload.rows),
    }
    try:
        in_turns(ways, 1)  # compiles and captures
        found = in_turns(ways, 1 if section.rehearsal else MOST_TURNS, lambda: section.left_s)
    finally:
        peer.close()
    series = Series(found["ours"], peer=found["peer"])
    # In float32: rounding to bfloat16 would decide between almost equal logits
    if section.rehearsal and series.ours[0].answers != series.peer[0].answers:
        raise WrongResult(f"{peer.name} gives other answers")
    result = told(section, workload, series, peer.name)
    return replace(result, targets={f"times as fast as {peer.name}": AIM})
