"""Tests that a step's plan contains everything for a runner: pickled plans give equal results."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings

from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from tests.batchinfer.engine.driver import ROOTS, Piped
from tests.batchinfer.engine.hashing_model import EOS as HASHED_EOS
from tests.batchinfer.engine.hashing_model import hashing_runner
from tests.batchinfer.engine.random_work import Work, works
from tests.batchinfer.engine.small_engine import (
    drain,
    following,
    make_engine,
    request,
    watcher,
)
from tests.batchinfer.engine.word_constraints import WordConstraints
from tests.examples import examples


@pytest.mark.parametrize("kind", [ModelRunner, DeviceRunner])
@settings(max_examples=examples(5, 100), deadline=None, print_blob=True)
@given(work=works(may_constrain=True))
def test_plans_that_were_pickled_change_no_answer(kind: type[ModelRunner], work: Work) -> None:
    limits, found = work.limits, []
    for wrapped in (lambda same: same, Piped):
        made = hashing_runner(kind, limits.blocks, limits.block_size, work.nan_every, windows=work.windows)
        runner, masks = following(made, WordConstraints(HASHED_EOS))
        engine = make_engine(
            wrapped(runner), limits, frozenset([HASHED_EOS]), stop_streams=watcher, masks=masks
        )
        found.append(drain(engine, work.rows, arrivals=work.arrivals))
    piped, plain = found
    assert piped.answers == plain.answers
    assert piped.logprobs == plain.logprobs


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
def test_plans_of_many_rows_are_small(params: dict[str, Any]) -> None:
    """Measured in the steady state, where a row ends in nearly every step."""
    rows = []
    for key in range(1025):
        one = request(key, [5] * 513, 900, **params)
        rows.append(Sequence.of(one, ROOTS, None, 0.0))
        rows[-1].tables = [[33 * key + at for at in range(33)]]
    writer = PlanWriter()

    def plan(at: int, chosen: list[Sequence]) -> bytes:
        chunks = [Chunk(row, 512 + at, 1) for row in chosen]
        for row in chosen:
            row.tokens.extend([7] * (513 + at - len(row)))
        return pickle.dumps(writer.of(Step(chunks), chosen))

    plan(0, rows[:1024])
    assert len(plan(1, rows[:1024])) < 15_000
    assert len(plan(2, rows[1:])) < 60_000
