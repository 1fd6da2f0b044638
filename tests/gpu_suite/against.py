"""The `mixed` workload beside transformers' continuous batching, in turns, with the same weights on the same device.

Small enough that the other one ends in time; workloads.py has what is large enough for a steady state.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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

WORKLOAD = "mixed"
TINY_CACHE = {"num_blocks": 8, "max_batch_tokens": 64}
AIM = 3.0  # times as fast as continuous batching


def parts(section: BenchSection) -> list[Part]:
    """Return the one part; its turns are as many as the time allows, up to three."""
    return [(WORKLOAD, partial(_against, section))]


def mixed(section: BenchSection) -> Workload:
    """In its own size, and two short rows in a rehearsal."""
    vocab = shape_config(model_name(section)).vocab
    if not section.rehearsal:
        return make_workload(WORKLOAD, vocab)
    rows = make_workload(WORKLOAD, vocab, 2).rows
    return Workload(WORKLOAD, tuple(Row(row.prompt[:TINY_PROMPT], TINY_OUTPUT) for row in rows))


def _against(section: BenchSection) -> Result:
    series = Series()
    loaded, workload = loaded_model(section), mixed(section)
    dtype, spec = dtype_of(section), source(section).spec
    weights = DummyWeights(spec, getattr(torch, dtype), section.device)
    cache = TINY_CACHE if section.rehearsal else None
    peer = ContinuousPeer(SHAPES[model_name(section)], weights, section.device, dtype, cache)
    try:
        timed_run(loaded, workload.rows, planner=plan_in_memory)
        turn_s = peer.run(workload.rows).wall_s
        for turn in range(1 if section.rehearsal else MOST_TURNS):
            if turn and section.left_s < 1.2 * turn_s:
                break
            series.ours.append(timed_run(loaded, workload.rows, planner=plan_in_memory))
            series.peer.append(peer.run(workload.rows))
            turn_s = series.ours[-1].wall_s + series.peer[-1].wall_s
    finally:
        peer.close()
    equal = series.ours[0].answers == series.peer[0].answers
    # In float32; what bfloat16 rounds decides between almost equal logits
    if section.rehearsal and not equal:
        raise WrongResult(f"{peer.name} gives other answers")
    found = told(section, workload, series, peer.name)
    return replace(found, targets={f"times as fast as {peer.name}": AIM})
