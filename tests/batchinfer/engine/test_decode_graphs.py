"""Tests which graph runs a step, which inputs are copied into it, and steps without a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.engine.graphs import decode_graphs
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.graph_capture import Capture, CapturedFunction, NotCaptured
from batchinfer.engine.loop.drafting import Drafter
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.device_tables import DeviceTables, GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.engine.tensors.graph_sizes import MIN_CONTEXT_BOUND, batch_sizes, context_bound
from batchinfer.engine.tensors.step_state import StepState
from batchinfer.models.ops.attention import AttentionInputs, FixedPlan
from tests.batchinfer.engine.driver import sequence
from tests.batchinfer.engine.hashing_model import (
    EOS,
    HashingOps,
    captured_eagerly,
    hashing_runner,
    with_graphs,
)
from tests.batchinfer.engine.small_engine import Limits, Ran, drain, greedy, layer_each, make_engine
from tests.batchinfer.engine.speculating import Drafts, remembered

LIMITS = Limits(budget=64, seqs=12, blocks=60, block_size=4)
CPU = torch.device("cpu")


def test_batch_sizes():
    assert batch_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert batch_sizes(3) == [1, 2, 3]
    assert len(batch_sizes(1024)) == 67


@given(st.integers(1, 3000), st.data())
def test_a_step_is_padded_little(most, data):
    rows = data.draw(st.integers(1, most))
    size = next(s for s in batch_sizes(most) if s >= rows)
    assert size - rows < min(rows, 8) or size - rows <= rows / 16


@given(st.integers(1, 10**6), st.data())
def test_the_bound_of_contexts_grows_in_few_steps(most, data):
    longest = data.draw(st.integers(1, most))
    bound = context_bound(longest, most)
    assert longest <= bound <= max(MIN_CONTEXT_BOUND, 4 * longest)
    assert bound <= most
    assert len({context_bound(n, most) for n in range(1, most + 1, max(1, most // 99))}) <= 6


class Counting:
    """Captures functions, counts captures and replays, and runs out of memory after `room` captures."""

    def __init__(self, room: int = 1 << 30, lacks: Exception | None = None) -> None:
        self.captured: list[int] = []
        self.places: dict[int, set[int]] = {}  # by number of rows: addresses of the results
        self.tried = self.replays = 0
        self.room, self.lacks = room, lacks or torch.OutOfMemoryError("none left")

    def __call__(self, run: Callable[[], Tensor]) -> CapturedFunction:
        self.tried += 1
        if self.tried > self.room:
            raise self.lacks

        def noted() -> Tensor:
            result = run()
            self.places.setdefault(len(result), set()).add(result.data_ptr())
            return result

        inner = captured_eagerly(noted)
        self.captured.append(len(inner.result))

        def replay() -> None:
            self.replays += 1
            inner.replay()

        return CapturedFunction(inner.result, replay)


def ran(
    capture: Capture | None = None,
    rows: int = 12,
    longest: int = 40,
    warmed_up: bool = False,
    drafter: Drafter | None = None,
) -> Ran:
    """Run 20 rows, with graphs for decode steps if `capture` is given."""
    runner = hashing_runner(DeviceRunner, LIMITS.blocks, LIMITS.block_size)
    if capture is not None:
        drafts = drafter is not None
        runner = with_graphs(runner, rows, longest, LIMITS.blocks, capture, drafts)
    if warmed_up:
        runner.graphs.end_warm_up()
    prompts = [[i % 7, 3, i % 5, *[1] * (i % 3)] for i in range(20)]
    engine = make_engine(runner, LIMITS, frozenset([EOS]), drafter=drafter)
    return drain(engine, greedy(prompts, 12, ignore_eos=drafter is not None))


def test_steps_of_single_tokens_are_replayed_and_captured_once():
    capture = Counting()
    got = ran(capture)
    assert got.answers == ran().answers
    pure = [s for s in got.steps if s.decode_tokens + s.padded_tokens and not s.prefill_tokens]
    assert capture.replays == len(pure) > len(capture.captured)
    assert all((s.launch == "full_graph") == (s in pure) for s in got.steps), "others are eager"
    assert sum(s.capture_s > 0 for s in got.steps) == len(capture.captured)
    assert set(capture.captured) <= {1, 2, 4, 8, 12}
    assert all(capture.captured.count(size) <= 2 for size in capture.captured), "there are two kinds of plans"
    assert got.total("padded_tokens") > ran().total("padded_tokens"), "rows up to the size of the graph"


def test_graphs_of_many_rows_share_the_memory_of_their_results(monkeypatch):
    monkeypatch.setattr(decode_graphs, "SHARED_RESULT_ROWS", 4)
    capture = Counting()
    assert ran(capture).answers == ran().answers
    many = [places for rows, places in capture.places.items() if rows >= 4]
    assert len(many) > 1
    assert len(set().union(*many)) == 1


def test_steps_that_verify_drafts_are_replayed_and_captured_once():
    """Tokens of any number of rows are padded together."""
    wanted, capture = ran(drafter=Drafts(lambda _: [])), Counting()
    drafts = Drafts(remembered(wanted, 0.8, 1, most=2))
    got = ran(capture, drafter=drafts)
    assert got.answers == wanted.answers
    assert len(got.steps) < len(wanted.steps)
    pure = [s for s in got.steps if s.decode_tokens + s.padded_tokens and not s.prefill_tokens]
    assert {s.launch for s in pure} == {"full_graph"}
    assert capture.replays > len(capture.captured)
    assert set(capture.captured) <= {1, 2, 4, 8, 12, 16, 24, 32, 36}
    assert max(capture.captured) > 12
    assert all(capture.captured.count(size) <= 8 for size in capture.captured), "plans and rows' tokens"


@pytest.mark.parametrize("most", [0, 1])
def test_graphs_of_drafts_leave_room_for_others(monkeypatch: pytest.MonkeyPatch, most: int):
    monkeypatch.setattr(decode_graphs, "MOST_DRAFTED", most)
    wanted, capture = ran(drafter=Drafts(lambda _: [])), Counting()
    got = ran(capture, drafter=Drafts(remembered(wanted, 0.8, 1)))
    assert got.answers == wanted.answers
    assert sum(size > 12 for size in capture.captured) <= most
    assert {s.launch for s in got.steps} == {"full_graph", "eager"}


@pytest.mark.parametrize(("rows", "longest"), [(3, 40), (12, 9)])
def test_steps_without_a_graph_run_eagerly(rows, longest):
    capture = Counting()
    assert ran(capture, rows, longest).answers == ran().answers
    decodes = sum(not s.prefill_tokens for s in ran().steps)
    assert 0 < capture.replays < decodes


@pytest.mark.parametrize("room", [0, 1])
@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        (torch.OutOfMemoryError("none left"), "too little GPU memory to capture"),
        (NotCaptured("operation not permitted"), "and run slower: operation not permitted"),
    ],
    ids=["no memory", "an operator refuses"],
)
def test_captured_graphs_are_replayed_after_a_capture_fails(caplog, room, lacks, said):
    """After an out-of-memory error, other steps run without a graph."""
    capture, enough = Counting(room, lacks), Counting()
    got, wanted = ran(capture), ran(enough)
    assert got.answers == wanted.answers == ran().answers
    assert (capture.tried, len(capture.captured)) == (room + 1, room)
    launched = [s.launch for s in got.steps].count("full_graph")
    assert launched == capture.replays < enough.replays
    assert (launched > 1) == (room > 0)
    assert [r.levelname for r in caplog.records].count("WARNING") == 1
    assert caplog.text.count(said) == 1


def test_after_the_warm_up_a_repeated_kind_of_step_is_captured():
    """Kinds of steps that occur once or twice run eagerly; answers are equal."""
    at_once, later = Counting(), Counting()
    wanted, got = ran(at_once), ran(later, warmed_up=True)
    assert got.answers == wanted.answers
    assert 0 < len(later.captured) < len(at_once.captured)
    assert [s.launch for s in got.steps].count("full_graph") == later.replays
    assert later.replays >= at_once.replays - 2 * len(at_once.captured)


class OneRow:
    """Decode graphs of one row without an engine, which record reused plans and read blocks."""

    def __init__(self) -> None:
        self.read: list[list[list[int]]] = []
        self.carried: list[bool] = []
        self.writer, self.state, self.tables = PlanWriter(), StepState(), DeviceTables()
        self.layout = layout = layer_each([None], 4)
        limits = GraphSize(1, 16, 4, padding_slot=120)
        laid = GraphTables(1, limits.table_entries, CPU)
        ops = CarryingOps(self.carried)
        self.graphs = DecodeGraphs(self._forward, ops, limits, layout.groups, laid, captured_eagerly)

    def _forward(self, token_ids: Tensor, inputs: Any, plans: Any) -> Tensor:
        self.read.append(inputs[0].block_tables.tolist())
        return torch.zeros(len(token_ids), 1)

    def step(self, sequence: Sequence, context: int) -> None:
        plan = self.writer.of(Step([Chunk(sequence, context - 1, 1)]), [sequence])
        batch = self.state.batch(plan, self.layout)
        self.tables.refresh(self.state.tables, CPU)
        self.graphs.run(batch, self.tables, lambda _: None)


class CarryingOps(HashingOps):
    def __init__(self, carried: list[bool]) -> None:
        self._carried = carried

    def plan_captured(self, inputs: AttentionInputs, *_: Any, before: Any = None, **__: Any) -> FixedPlan:
        self._carried.append(before is not None)
        return super().plan_captured(inputs)


def test_graphs_read_the_current_block_tables():
    """A row that was preempted has other blocks, and may return one token later."""
    one, row = sequence([1] * 20, 20), OneRow()
    for context, table in ((9, [1, 2, 3]), (10, [1, 2, 3]), (11, [7, 8, 9]), (13, [7, 8, 9, 4])):
        one.tables = [table]
        if table[0] == 7:
            row.graphs.interrupt()
        row.step(one, context)
        assert row.read[-1] == [[*table, *[0] * (4 - len(table))]]


def test_the_plan_of_the_last_step_is_reused_for_the_same_rows_one_token_later():
    one, other, row = sequence([1] * 20, 20), sequence([1] * 20, 20), OneRow()
    one.tables, other.tables = [[1, 2, 3, 4]], [[1, 2, 3, 4]]
    for each, context in ((one, 9), (one, 10), (one, 12), (one, 13), (other, 14), (other, 15)):
        row.step(each, context)
    assert row.carried == [False, True, False, True, False, True]


def test_engines_that_share_graphs_do_not_reuse_each_others_plans():
    """Rows of the two engines have equal lengths."""
    one, other, row = sequence([1] * 20, 20), sequence([1] * 20, 20), OneRow()
    one.tables, other.tables = [[1, 2, 3]], [[7, 8, 9]]
    turns = [(row.writer, row.state, row.tables), (PlanWriter(), StepState(), DeviceTables())]
    for context in (9, 10, 11):
        for turn, each in zip(turns, (one, other), strict=True):
            row.writer, row.state, row.tables = turn
            row.step(each, context)
            assert row.read[-1] == [[*each.tables[0], 0]]
    assert not any(row.carried)


def test_tables_that_were_written_in_part_are_written_again(monkeypatch):
    """Graphs of all sizes share one buffer of tables."""
    sequences = [sequence([1] * 8, 20) for _ in range(4)]
    for number, one in enumerate(sequences):
        one.tables = [[2 * number + 1, 2 * number + 2], [2 * number + 21, 2 * number + 22]]
    state, kept = StepState(), DeviceTables()
    plan = PlanWriter().of(Step([Chunk(one, 0, 8) for one in sequences]), sequences)
    tables = state.batch(plan, layer_each([None, None], 4)).tables
    kept.refresh(state.tables, CPU)
    laid, size, larger = GraphTables(2, 100, CPU), GraphSize(4, 8, 4, 0), GraphSize(4, 16, 4, 0)
    wanted = [view.tolist() for view in laid.fill(size, tables, kept)]

    def stopped(views: list[Tensor], *rest: Any) -> None:
        views[0].fill_(99)
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(kept, "write", stopped)
        with pytest.raises(torch.OutOfMemoryError):
            laid.fill(larger, tables, kept)
    assert [view.tolist() for view in laid.fill(size, tables, kept)] == wanted
