"""Tests that steps with prompts are replayed in pieces, with the same answers and no reads outside a graph.

`Taped` replaces the device's graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from batchinfer.engine.graphs.graph_capture import NotCaptured, R, Replay
from batchinfer.engine.graphs.piecewise_graphs import EVEN, PiecewiseGraphs, token_sizes
from batchinfer.models.checkpoint.checkpoint import Checkpoint, inspect_checkpoint
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import TorchOps
from tests.batchinfer import made_up
from tests.batchinfer.engine.interpreted_gpu import triton_ops
from tests.batchinfer.engine.small_engine import (
    MIXED,
    TRITON,
    Limits,
    Ran,
    checkpoint,
    drain,
    greedy,
    looking_ahead,
    make_engine,
    make_runner,
)
from tests.batchinfer.engine.taped import Taped
from tests.examples import first_of

VARIANTS = {
    "llama": ("llama", {}),
    "two groups of windows": ("qwen2", MIXED),
    "soft caps and norms behind": ("gemma2", {"sliding_window": 24}),
    "halves side by side": ("cohere", {"tied": True}),
    "one norm for both halves": ("gpt_neox", {}),
    "learned positions": ("gpt2", {}),
    "sinks": ("gpt_oss", {"sliding_window": 24, "num_local_experts": 1, "num_experts_per_tok": 1}),
}
LIMITS = Limits(budget=100, seqs=6, blocks=90, block_size=8)
PROMPTS = [[i % 7 + 1, *[3 + i % 5] * (5 * i % 37), 9 + i] for i in range(14)]


def test_sizes():
    assert token_sizes(700) == [64, 128, 256, 320, 384, 448, 512, 640, 700]
    assert token_sizes(1672)[-4:] == [1024, 1280, 1536, 1672]
    assert token_sizes(40) == [40]
    assert token_sizes(0) == []
    assert len(token_sizes(8192)) == 23


@given(st.integers(1, 8192), st.data())
def test_a_step_is_padded_by_a_quarter_at_most(most, data):
    tokens = data.draw(st.integers(1, most))
    size = next(size for size in token_sizes(most) if size >= tokens)
    assert size <= EVEN or size <= 1.25 * tokens


class Poisoned(PiecewiseGraphs):
    """Poisons padding tokens, which find an earlier step's values after attention."""

    def run(self, *step: Any) -> tuple[Tensor, int]:
        for left in (self._buffers.queries, self._buffers.attended, self._buffers.hidden):
            left.fill_(float("nan"))
        return super().run(*step)


def runner_for(
    model: Checkpoint,
    recorder: Taped | None,
    limits: Limits = LIMITS,
    most: int = 80,
    ops: Ops | None = None,
) -> Any:
    """Return a runner as for a GPU, by default on torch's operators. The cache's last block is the padding
    slot."""
    runner = looking_ahead(make_runner(model, ops or TorchOps(), replace(limits, blocks=limits.blocks + 1)))
    if recorder is None:
        return runner
    decoder: Any = runner.model
    places = (len(runner.layout.groups), limits.blocks * limits.block_size)
    mixed = Poisoned(decoder, runner.caches, *places, decoder.static_buffers(most), recorder)
    mixed.capture()
    return replace(runner, mixed=mixed)


def ran(runner: Any, model: Checkpoint, limits: Limits = LIMITS, **more: Any) -> Ran:
    engine = make_engine(runner, limits, frozenset(model.spec.eos_token_ids))
    return drain(engine, greedy(PROMPTS, 6, **more))


def check(model: Checkpoint, limits: Limits = LIMITS) -> tuple[Taped, Ran]:
    recorder = Taped()
    runner = runner_for(model, recorder, limits)
    attending = sum(layer.attention is not None for layer in model.spec.layers)
    assert len(recorder.launches) == runner.mixed.captured == len(runner.mixed.sizes) * (attending + 1)
    wanted, got = (ran(own, model, limits) for own in (runner_for(model, None, limits), runner))
    assert got.answers == wanted.answers
    sizes = [step.prefill_tokens + step.decode_tokens + step.padded_tokens for step in got.steps]
    captured = sum(size in runner.mixed.sizes for size in sizes)
    assert recorder.replays >= captured * (attending + 1) > 0
    assert [step.launch for step in got.steps].count("piecewise_graph") * (attending + 1) == recorder.replays
    assert runner.capture_s == runner.mixed.capture_s > 0 == sum(step.capture_s for step in got.steps)
    return recorder, got


@pytest.mark.sample(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_the_same(variant):
    family, options = VARIANTS[variant]
    check(checkpoint(family, **options))


def test_layers_that_read_the_cache_of_another_or_attend_to_nothing(monkeypatch, tmp_path):
    made_up.register(monkeypatch)
    model = made_up.MadeUp(reads=(0, 0, None, 3, 3), windows=(None, None, None, 24, 24))
    model.write(tmp_path, seed=3)
    check(inspect_checkpoint(tmp_path))


@TRITON
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # masked lanes are computed too, by NumPy
@pytest.mark.parametrize("family", first_of(("deepseek_v3", "qwen2_moe"), 1))
def test_padding_rows_change_no_bit_and_no_count_of_experts(family):
    """Runs Triton's operators in deterministic mode."""
    model = checkpoint(family)
    limits, recorder, found = replace(LIMITS, budget=30), Taped(), []
    for own in (None, recorder):
        runner = runner_for(model, own, limits, most=40, ops=triton_ops(model, deterministic=True))
        runner.model.expert_loads.restart()
        engine = make_engine(runner, limits, frozenset(model.spec.eos_token_ids))
        got = drain(engine, greedy(PROMPTS[:3], 2, logprobs=2, ignore_eos=True))
        found.append((got.answers, got.logprobs, runner.model.expert_loads.read()))
    assert recorder.replays > 0
    assert found[0] == found[1]
    assert any(map(sum, found[0][2].values()))


def test_rows_that_copy_from_the_middle_of_a_block_are_captured_too():
    """The copy runs next to attention, outside of the pieces."""
    _, got = check(checkpoint("llama"), replace(LIMITS, copying=True, seqs=3))
    assert sum(step.copied_tokens for step in got.steps) > 0


class Full(Taped):
    """A device with memory for `room` recordings.

    Warm-ups of more than `most` tokens run out of memory and reduce the rest.
    """

    lacks: Exception = torch.OutOfMemoryError("none left")

    def __init__(self, room: int = 1 << 30, most: int = 64) -> None:
        super().__init__()
        self.room, self.most, self.tried = room, most, 80

    def warm_up(self, run: Callable[[], object]) -> None:
        if self.tried > self.most:
            self.tried -= 16
            raise torch.OutOfMemoryError("none left")
        super().warm_up(run)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        if len(self.launches) == self.room:
            raise self.lacks
        return super().record(run)


class Stubborn(Full):
    """A device on which an operator can run, but not be captured."""

    lacks = NotCaptured("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("recorder", "most", "sizes"),
    [
        (Full(room=0, most=80), 80, []),
        (Full(room=4, most=80), 80, [80]),  # two layers are three pieces
        (Stubborn(room=4, most=80), 80, [80]),
        (Full(), 80, [64]),
        (Taped(), 20, [20]),
    ],
    ids=["no memory", "memory for the first", "a piece fails", "memory for smaller ones", "larger steps"],
)
def test_steps_that_are_not_captured_are_launched(caplog, recorder, most, sizes):
    model = checkpoint("llama")
    runner = runner_for(model, recorder, most=most)
    assert runner.mixed.sizes == sizes
    full = type(recorder) is Full
    assert ("too little GPU memory to capture steps of" in caplog.text) == full
    assert ("and run slower: operation not permitted" in caplog.text) == isinstance(recorder, Stubborn)
    got = ran(runner, model)
    assert got.answers == ran(runner_for(model, None), model).answers
    tokens = [step.prefill_tokens + step.decode_tokens for step in got.steps]
    largest = max(sizes, default=0)
    assert max(tokens) > largest
    assert recorder.replays == 3 * sum(n <= largest for n in tokens)
    assert (recorder.replays > 0) == (largest > 0)
