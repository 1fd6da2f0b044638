"""The order that a job gets is the one that the simulator finds fastest: an 8B model on an H100, by its datasheet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from batchinfer.bench.workloads import make_workload
from batchinfer.core.errors import StorageError
from batchinfer.plan.forecast import order_choice
from batchinfer.plan.forecast.order_choice import best, compared
from batchinfer.plan.forecast.text import order_line
from batchinfer.plan.order.policies import OrderChoice, OrderPolicy
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from tests.batchinfer.plan.forecast.order_table import clustered, h100, sampled

SEQS = 64  # so that a few hundred rows are several batches


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "rows"), [("shared-prefix", 192), ("mixed", 192), ("prefix-tree", 192)])
def test_the_chosen_order_is_never_worse_than_a_simpler_one(name: str, rows: int) -> None:
    seconds = compared(h100(SEQS), sampled(make_workload(name, 32_000, rows).rows), AnswerLengths.unknown())
    assert set(seconds) == set(OrderPolicy)
    assert seconds[best(seconds, all_rows=True)] == min(seconds.values())


def test_unlike_work_that_arrives_clustered_is_blended() -> None:
    seconds = compared(h100(SEQS), sampled(clustered(250)), AnswerLengths.unknown())
    chosen = best(seconds, all_rows=True)
    assert chosen is OrderPolicy.BLENDED
    assert seconds[chosen] < 0.99 * seconds[OrderPolicy.DEPTH_FIRST]
    assert seconds[chosen] < 0.97 * seconds[OrderPolicy.ARRIVAL]


def test_an_order_that_is_better_in_a_part_of_the_job_has_to_be_so_for_sure() -> None:
    seconds = dict.fromkeys(OrderPolicy, 100.0) | {OrderPolicy.BLENDED: 99.0}
    assert best(seconds, all_rows=True) is OrderPolicy.BLENDED
    assert best(seconds, all_rows=False) is OrderPolicy.DEPTH_FIRST
    assert best(seconds | {OrderPolicy.BLENDED: 98.0}, all_rows=False) is OrderPolicy.BLENDED
    assert best(dict.fromkeys(OrderPolicy, 1.0), all_rows=True) is OrderPolicy.DEPTH_FIRST


def test_an_order_that_cannot_be_written_leaves_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs what the other order gains, and is told of."""

    def full(*_: object, **__: object) -> None:
        raise StorageError("plan.new: no space left on device")

    better = OrderChoice(OrderPolicy.BLENDED, "the fastest", {OrderPolicy.BLENDED: 1.0})
    monkeypatch.setattr(order_choice, "_choice", lambda *_: better)
    monkeypatch.setattr(order_choice, "reorder", full)
    chosen = order_choice.settle_order(SimpleNamespace(plan=None, machine=h100(SEQS)), None)
    assert chosen.policy is OrderPolicy.DEPTH_FIRST
    assert "blended" in chosen.why
    assert order_line(chosen) == (f"order: depth-first ({chosen.why}): blended 1 s",)
    assert "no space left" in chosen.why


def test_orders_are_not_compared_where_nothing_is_decoded() -> None:
    """Nothing of such an engine is simulated."""
    engine: Any = SimpleNamespace(least_s=lambda: 5.0, plan=SimpleNamespace(expected_tokens=0))
    chosen = order_choice.settle_order(engine, cast(Any, None))
    assert (chosen.policy, chosen.seconds) == (OrderPolicy.DEPTH_FIRST, {})
    assert "nothing is decoded" in chosen.why
