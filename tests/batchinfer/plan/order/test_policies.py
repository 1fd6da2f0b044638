"""Each policy orders every prompt once; the blended one mixes unlike work and lets nothing long begin late."""

from __future__ import annotations

import errno
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchinfer.core.errors import StorageError
from batchinfer.core.prefix_forest import prefix_forest
from batchinfer.core.request import common_prefix
from batchinfer.plan.order.plan import PLAN_SCHEMA
from batchinfer.plan.order.policies import Capacity, OrderPolicy, SharedWork
from batchinfer.plan.order.reorder import reorder
from batchinfer.plan.order.run_order import kept_together
from tests.batchinfer.data.small_index import good_row, key_of
from tests.batchinfer.plan.order.test_planner import plan_rows

ROOM = Capacity(64, 100_000)


def work_of(prompts: list[list[int]], outputs: list[int]) -> tuple[SharedWork, list[int]]:
    """The work, and which prompts it has, in its order."""
    ids = [np.array(prompt[:-1], np.int32) for prompt in prompts]
    found = sorted(range(len(ids)), key=lambda row: prompts[row])
    shared = [0, *(common_prefix(ids[a], ids[b]) for a, b in pairwise(found))]
    rows = np.array(found)
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)[rows]
    work = SharedWork(
        kept_together(prefix_forest(np.array(shared, np.int32))),
        lengths,
        np.array(outputs, np.int32)[rows],
        rows,
    )
    return work, rows.tolist()


def ordered(
    prompts: list[list[int]], outputs: list[int], policy: OrderPolicy, capacity: Capacity = ROOM
) -> list[int]:
    work, rows = work_of(prompts, outputs)
    places = work.places(policy, capacity).tolist()
    return [row for _, row in sorted(zip(places, rows, strict=True))]


jobs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=5), st.integers(1, 60), st.integers(0, 99)
    ),  # a path of 16-token stretches, tokens of its own, output
    min_size=1,
    max_size=40,
)


@given(jobs, st.sampled_from(OrderPolicy), st.builds(Capacity, st.integers(1, 9), st.integers(16, 4000)))
@settings(deadline=None, print_blob=True)
def test_every_policy_runs_each_prompt_once(job, policy, capacity):
    prompts = [
        [s for step in path for s in [step] * 16] + [50 + i] * own for i, (path, own, _) in enumerate(job)
    ]
    order = ordered(prompts, [output for *_, output in job], policy, capacity)
    assert sorted(order) == list(range(len(job)))
    if policy is OrderPolicy.ARRIVAL:
        assert order == sorted(order)
    if policy is OrderPolicy.LENGTH_SORTED:
        efforts = [len(prompts[row]) + 4 * job[row][2] for row in order]
        assert efforts == sorted(efforts, reverse=True)


def test_the_blended_order_has_the_job_s_mixture_throughout():
    """Half the rows read much and answer briefly, the other half the other way round, and they arrive so."""
    prompts = [[i] * 1000 for i in range(200)] + [[i] * 20 for i in range(200, 400)]
    outputs = [10] * 200 + [200] * 200
    order = ordered(prompts, outputs, OrderPolicy.BLENDED, Capacity(4, 100_000))
    reading = [sum(len(prompts[row]) for row in order[at : at + 40]) for at in range(0, 360, 40)]
    decoding = [sum(outputs[row] for row in order[at : at + 40]) for at in range(0, 360, 40)]
    mixture = sum(map(len, prompts)) / sum(outputs)
    assert all(0.8 * mixture < r / d < 1.25 * mixture for r, d in zip(reading, decoding, strict=True))
    depth_first = ordered(prompts, outputs, OrderPolicy.DEPTH_FIRST)
    assert {row // 200 for row in depth_first[:200]} == {0}, (
        "the order that is not blended does one after the other"
    )


def test_the_longest_answers_do_not_begin_last():
    prompts = [[i] * 50 for i in range(301)]
    outputs = [20] * 300 + [60]
    blended = ordered(prompts, outputs, OrderPolicy.BLENDED)
    # 300 × 20 + 60 steps of rows are 94.7 of the engine, and 1.3 × 60 have to be left
    assert blended.index(300) <= 301 * 17 / 94


def test_a_shared_prefix_is_walked_from_two_ends():
    """Documents of 160 tokens with eight questions: a scan takes all of one, but for where the two meet."""
    prompts = [[d] * 160 + [1000 + 8 * d + q] * (5 + d) for d in range(20) for q in range(8)]
    order = ordered(prompts, [30] * 160, OrderPolicy.BLENDED)
    for document in range(20):
        places = [place for place, row in enumerate(order) if row // 8 == document]
        assert places[-1] - places[0] < 40, "of 160 rows"


@pytest.mark.parametrize("policy", [OrderPolicy.BLENDED, OrderPolicy.ARRIVAL])
def test_a_plan_on_disk_is_put_in_another_order(policy, tmp_path: Path):
    prompts = [[i % 5] * 40 + [i % 3] * 30 + [i] * (i % 17 + 1) for i in range(150)]
    outputs = [1 + (7 * i) % 90 for i in range(150)]
    rows = [good_row(i, prompt, outputs[i]) for i, prompt in enumerate(prompts)]
    plan = plan_rows(tmp_path, rows)
    before = {row.pop("key"): row for row in pq.read_table(plan.path).to_pylist()}
    reorder(plan, policy, ROOM)
    table = pq.read_table(plan.path)
    assert table.schema.equals(PLAN_SCHEMA)
    assert table.column("seq").to_pylist() == list(range(150))
    after = {row.pop("key"): row for row in table.to_pylist()}
    assert all(row | {"seq": 0} == before[key] | {"seq": 0} for key, row in after.items())
    numbers = {key_of(prompt, outputs[i]): i for i, prompt in enumerate(prompts)}
    found = [numbers[key] for key in table.column("key").to_pylist()]
    assert sorted(found) == list(range(150))
    if policy is OrderPolicy.ARRIVAL:
        assert found == list(range(150))
    else:
        assert found != list(range(150))
        assert list(after) != list(before)


def test_a_plan_that_cannot_be_written_anew_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    plan = plan_rows(tmp_path, [good_row(i, [i] * 20, 9) for i in range(50)])
    before = plan.path.read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_batch", full)
    with pytest.raises(StorageError):
        reorder(plan, OrderPolicy.ARRIVAL, ROOM)
    assert plan.path.read_bytes() == before
    assert not list(plan.path.parent.glob("*.new"))
