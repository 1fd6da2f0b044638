"""Steps for which memory does not last: run in pieces, to the same answers, and said so."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.engine.device_runner import DeviceRunner
from batchinfer.engine.pieces import Pieces
from batchinfer.engine.scheduler import Chunk
from tests.batchinfer.engine.driver import sequence
from tests.batchinfer.engine.hashing_model import EOS, HashingModel, hashing_runner
from tests.batchinfer.engine.small_engine import Limits, Ran, drain, greedy, make_engine

LIMITS = Limits(budget=40, seqs=12, blocks=80, block_size=4)


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 30)), min_size=1, max_size=8),
    st.integers(1, 40),
)
def test_pieces_are_the_step_in_order(spans, tokens):
    chunks = [Chunk(sequence([1] * (start + length), 5), start, length) for start, length in spans]
    pieces = Pieces(tokens).cut(chunks)
    assert all(0 < sum(c.length for c in piece) <= tokens for piece in pieces)
    flat = [(c.sequence, at) for piece in pieces for c in piece for at in range(c.start, c.end)]
    assert flat == [(c.sequence, at) for c in chunks for at in range(c.start, c.end)]
    assert [c.sequence for piece in pieces for c in piece if c.samples] == [c.sequence for c in chunks]


def test_without_limits_a_step_is_one_piece():
    chunks = [Chunk(sequence([1] * 9, 5), 0, 9)]
    assert Pieces().cut(chunks) == [chunks]


def run(room: int) -> tuple[Ran, int]:
    runner = hashing_runner(DeviceRunner, LIMITS.blocks, LIMITS.block_size, room=room)
    engine = make_engine(runner, LIMITS, frozenset([EOS]))
    prompts = [[i % 7, 3, i % 5, *[1] * (i % 9)] for i in range(20)]
    return drain(engine, greedy(prompts, 12)), runner.most_tokens or 0


def test_what_a_failed_step_held_is_given_back_before_the_pieces_run(monkeypatch):
    """To the device: others than torch ask for memory, too."""
    held: list[weakref.ref[Tensor]] = []
    kept: list[int] = []
    real = HashingModel.forward

    def forward(self: HashingModel, token_ids: Tensor, *rest: Any) -> Tensor:
        made = torch.zeros(len(token_ids))
        held.append(weakref.ref(made))
        return real(self, token_ids, *rest)

    monkeypatch.setattr(HashingModel, "forward", forward)
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: kept.append(sum(one() is not None for one in held))
    )
    run(7)
    assert kept
    assert set(kept) == {0}


@pytest.mark.parametrize("room", [1, 3, 7, 25])
def test_answers_do_not_depend_on_it(room, caplog):
    (wanted, unlimited), (got, most) = run(1 << 30), run(room)
    assert got.answers == wanted.answers
    assert (unlimited, 1 <= most <= room) == (0, True)
    said = [record.args[0] for record in caplog.records if "the device had no memory" in record.message]
    assert said[0] == 40
    assert said == sorted(set(said), reverse=True), "each size is tried once"
    sizes = [s.prefill_tokens + s.decode_tokens for s in got.steps]
    assert max(sizes[2:]) <= most, "the scheduler was not told"


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=str,
)
def test_what_is_not_torch_s_says_in_its_own_words_that_memory_is_out(monkeypatch, error):
    """A kernel that is loaded late, a graph's first launch, a library's handle."""

    def forward(model: HashingModel, token_ids: Tensor, *step: Any) -> Tensor:
        if len(token_ids) > 7:
            raise error
        return whole(model, token_ids, *step)

    wanted, whole = run(1 << 30)[0].answers, HashingModel.forward
    monkeypatch.setattr(HashingModel, "forward", forward)
    got, most = run(1 << 30)
    assert got.answers == wanted
    assert 1 <= most <= 7


def test_other_errors_are_none_of_memory(monkeypatch):
    def forward(*_: Any) -> Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(HashingModel, "forward", forward)
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        run(1 << 30)


def test_not_even_one_token_is_an_error():
    with pytest.raises(torch.OutOfMemoryError):
        run(0)
