"""Tests steps that run out of memory: they run in micro-batches, with equal answers and a notice."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.engine.runner import micro_batches
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.micro_batches import STEPS_BEFORE_RETRY, MicroBatches
from batchinfer.engine.schedule.partial_blocks import Copy
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.tensors.batch import HostBatch
from batchinfer.engine.tensors.step_state import StepState
from tests.batchinfer.engine.driver import sequence
from tests.batchinfer.engine.hashing_model import EOS, HashingModel, hashing_runner
from tests.batchinfer.engine.small_engine import Limits, Ran, drain, greedy, layer_each, make_engine
from tests.examples import examples

LIMITS = Limits(budget=40, seqs=12, blocks=80, block_size=4)


def test_a_size_that_held_is_returned_to() -> None:
    """Half of a larger size that failed may be smaller."""
    batches = MicroBatches()
    batches.shrink(100, 1)
    for _ in range(STEPS_BEFORE_RETRY):
        batches.succeeded(50)
    assert batches.most_tokens is None
    batches.shrink(90, 1)
    assert batches.most_tokens == 50


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(1, 40) | st.none(),
    st.integers(1, 40) | st.none(),
)
def test_pieces_are_the_step_in_order(spans, tokens, fewer):
    """Pieces may be split again if memory is too small."""
    chunks = [Chunk(sequence([1] * sum(span), 5, n), *span) for n, span in enumerate(spans)]
    for number, chunk in enumerate(chunks):
        chunk.sequence.tables = [[100 * number + at for at in range(20)]]
    copies = [Copy(chunk.sequence, 0, 7, 8, 0, 1 + number) for number, chunk in enumerate(chunks)]
    plan = PlanWriter().of(Step(chunks, copies=copies), [chunk.sequence for chunk in chunks])
    whole = StepState().batch(plan, layer_each([None], 4))
    batches = [
        piece for batch in MicroBatches(tokens).split(whole) for piece in MicroBatches(fewer).split(batch)
    ]
    sizes, most = [len(batch.token_ids) for batch in batches], min(tokens or 1000, fewer or 1000)
    assert all(0 < size <= most for size in sizes)
    assert tokens or fewer or len(sizes) == 1
    positions, slots = (
        np.concatenate(each) for each in zip(*((b.positions, b.slots[0]) for b in batches), strict=True)
    )
    assert (positions.tolist(), slots.tolist()) == (whole.positions.tolist(), whole.slots[0].tolist())
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    rows = [int(row) + start for b, start in zip(batches, starts, strict=True) for row in b.sampled_rows]
    assert rows == whole.sampled_rows.tolist()
    for batch in batches:
        check_part(batch)
    made = [copy for batch in batches if batch.copies is not None for copy in batch.copies.tolist()]
    assert [copy[1:] for copy in made] == [list(copy[1:]) for copy in copies]
    for batch in batches:
        assert batch.copies is None or all(0 <= chunk < len(batch.query_lens) for chunk in batch.copies[:, 0])


def check_part(batch: HostBatch) -> None:
    """Check that positions follow from the contexts of rows, and slots from block tables."""
    each = list(zip(batch.table_rows.tolist(), batch.query_lens, batch.context_lens, strict=True))
    assert batch.positions.tolist() == [at for _, n, end in each for at in range(end - n, end)]
    table = [row for row, n, _ in each for _ in range(n)]
    slots = batch.tables[0].kept[table, batch.positions // 4] * 4 + batch.positions % 4
    assert slots.tolist() == batch.slots[0].tolist()


def run(room: int) -> tuple[Ran, int]:
    runner = hashing_runner(DeviceRunner, LIMITS.blocks, LIMITS.block_size, room=room)
    engine = make_engine(runner, LIMITS, frozenset([EOS]))
    prompts = [[i % 7, 3, i % 5, *[1] * (i % 9)] for i in range(20)]
    return drain(engine, greedy(prompts, 12)), runner.most_tokens or 0


def before_forward(monkeypatch: pytest.MonkeyPatch, called: Callable[[Tensor], Any]) -> None:
    """Call a function before each step of the model and keep its result alive during the step."""
    whole = HashingModel.forward

    def forward(model: HashingModel, token_ids: Tensor, *step: Any) -> Tensor:
        _held = called(token_ids)
        return whole(model, token_ids, *step)

    monkeypatch.setattr(HashingModel, "forward", forward)


def test_memory_of_a_failed_step_is_released_before_its_micro_batches_run(monkeypatch):
    """Other libraries than torch need device memory, too."""
    held: list[weakref.ref[Tensor]] = []
    kept: list[int] = []

    def hold(token_ids: Tensor) -> Tensor:
        made = torch.zeros(len(token_ids))
        held.append(weakref.ref(made))
        return made

    before_forward(monkeypatch, hold)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: kept.append(sum(one() is not None for one in held))
    )
    run(7)
    assert kept
    assert set(kept) == {0}


def try_steps(batches: MicroBatches, wanted: int, room: int, steps: int) -> list[int]:
    """Return the failed steps out of `steps` steps of up to `wanted` tokens with memory for `room` tokens."""
    failed = []
    for step in range(steps):
        todo = [wanted]
        while todo:
            tokens = min(todo.pop(), batches.most_tokens or wanted)
            if tokens > room:
                batches.shrink(tokens, 1)
                failed.append(step)
                todo.append(wanted)
            else:
                batches.succeeded(tokens)
    return failed


def test_a_size_for_which_there_is_never_memory_is_tried_ever_more_seldom():
    batches = MicroBatches()
    failed = try_steps(batches, wanted=60, room=40, steps=100 * STEPS_BEFORE_RETRY)
    assert failed == [0, *(STEPS_BEFORE_RETRY * (2**n - 1) for n in range(1, 7))]
    assert batches.most_tokens == 30, "the size that fitted, not half of the size that failed"


def test_a_size_that_held_for_long_is_trusted_again_as_soon_as_at_first():
    batches = MicroBatches()
    for _ in range(5):
        assert try_steps(batches, wanted=64, room=50, steps=1) == [0]
        assert try_steps(batches, wanted=64, room=64, steps=2 * STEPS_BEFORE_RETRY) == []
        assert batches.most_tokens is None


def test_small_steps_do_not_raise_the_limit():
    batches = MicroBatches()
    try_steps(batches, wanted=64, room=40, steps=1)
    try_steps(batches, wanted=15, room=40, steps=10 * STEPS_BEFORE_RETRY)
    assert batches.most_tokens == 32


@settings(max_examples=examples(13, 40), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80), st.integers(1, 2000)), max_size=12))
def test_no_step_is_split_forever_and_few_fail(phases):
    """Phases are (wanted tokens, tokens that fit into memory, steps)."""
    batches, failures, steps = MicroBatches(), 0, 0
    for wanted, room, count in phases:
        failures += len(try_steps(batches, wanted, room, count))
        steps += count
        assert batches.most_tokens is None or batches.most_tokens >= 1
    halvings = 7  # of 80, each time that a phase begins with less room
    assert failures <= halvings * len(phases) + 2 * steps / STEPS_BEFORE_RETRY
    try_steps(batches, 80, 80, 8 * STEPS_BEFORE_RETRY * (1 + len(phases)) + 4 * steps)
    assert batches.most_tokens is None


def test_step_sizes_recover_when_a_peak_has_passed(monkeypatch):
    """Answers are equal."""
    monkeypatch.setattr(micro_batches, "STEPS_BEFORE_RETRY", 3)
    wanted, _ = run(1 << 30)
    ran: list[int] = []

    def scarce_at_first(token_ids: Tensor) -> None:
        ran.append(len(token_ids))
        if len(ran) <= 12 and len(token_ids) > 7:
            raise torch.OutOfMemoryError("none left")

    before_forward(monkeypatch, scarce_at_first)
    got, most = run(1 << 30)
    assert got.answers == wanted.answers
    assert most > 12, "more than there are rows: decode steps say nothing about more"
    assert max(ran[:12]) == 40
    sizes = [s.prefill_tokens + s.decode_tokens for s in got.steps]
    assert max(sizes[-20:]) > 7


@pytest.mark.parametrize("room", [1, 3, 7, 25])
def test_micro_batches_change_no_answer(room, caplog):
    (wanted, unlimited), (got, most) = run(1 << 30), run(room)
    assert got.answers == wanted.answers
    assert (unlimited, 1 <= most <= room) == (0, True)
    said = [
        record.args[0] for record in caplog.records if "the device had too little memory" in record.message
    ]
    assert said[0] == 40
    assert said == sorted(set(said), reverse=True), "each size is tried once"
    sizes = [s.prefill_tokens + s.decode_tokens for s in got.steps]
    assert max(sizes[2:]) <= most, "the scheduler has the old maximum"


def test_out_of_memory_errors_of_other_libraries_are_recognised(monkeypatch):
    """For example of a kernel that loads late, a graph's first launch, or a library's handle."""
    wanted = run(1 << 30)[0].answers

    def fail(token_ids: Tensor) -> None:
        if len(token_ids) > 7:
            raise RuntimeError("Triton Error [CUDA]: out of memory")

    before_forward(monkeypatch, fail)
    got, most = run(1 << 30)
    assert got.answers == wanted
    assert 1 <= most <= 7


def test_other_errors_are_not_taken_for_out_of_memory(monkeypatch):
    error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
    before_forward(monkeypatch, Mock(side_effect=error))
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        run(1 << 30)


def test_not_even_one_token_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        run(0)
