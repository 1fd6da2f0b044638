"""Tests how memory is divided: a step is measured, the cache gets the rest, and failed requests shrink."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from batchinfer.core.errors import OutOfMemory
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.graphs.graph_capture import Capture
from batchinfer.engine.graphs.piecewise_graphs import GRAPH_BYTES
from batchinfer.engine.kv.memory import CPU_FRACTION, GPU_RESERVE, GPU_RESERVE_SHARE, JobSize, cache_blocks
from batchinfer.engine.kv.table_sizes import TableSizes
from batchinfer.engine.load import device_fit
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.device_fit import CacheRoom, FittedRunner, fit
from batchinfer.engine.load.dummy_steps import COSTLY, GREEDY, DummySteps, sizes_between
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.engine.tensors.device_tables import GraphTables
from batchinfer.models.ops.attention import AttentionInputs, LayerCache
from batchinfer.models.ops.cpu_ops import CpuOps
from batchinfer.models.ops.interface import Ops
from batchinfer.models.ops.torch_ops import GroupedPlan, TorchOps
from batchinfer_kernels.log_probabilities import log_probabilities_reference
from tests.batchinfer.engine.hashing_model import captured_eagerly
from tests.batchinfer.engine.small_engine import (
    Limits,
    checkpoint,
    cpu_ops,
    drain,
    greedy,
    make_engine,
    make_runner,
)
from tests.batchinfer.engine.taped import Taped
from tests.batchinfer.engine.test_adapters import adapters
from tests.batchinfer.engine.word_constraints import WordConstraints
from tests.checkpoints import make_checkpoint

CACHE = 1 << 18
LONGEST, SIZE = 100, 8
SPEC = checkpoint("llama").spec
STEPS = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=250)


def test_an_engine_takes_at_most_its_share_of_memory(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", seed=5)
    config = EngineConfig(LoadConfig(tmp_path, "float32", "cpu", threads=1), max_model_len=64, longest=64)
    whole = load_model(config).info
    part = whole.weight_bytes + CACHE
    info = load_model(replace(config, memory=part)).info
    assert CACHE * CPU_FRACTION * 0.8 < info.kv_bytes <= CACHE * CPU_FRACTION
    assert info.kv_bytes < whole.kv_bytes
    assert load_model(replace(config, memory=part << 10)).info.kv_bytes == whole.kv_bytes
    with pytest.raises(OutOfMemory):
        load_model(replace(config, memory=whole.weight_bytes // 2))


class Device:
    """A model on a device with limited memory, and a meter that counts the tokens of a step.

    Args:
        tokens: maximum number of tokens per step.
        blocks: maximum number of blocks.
    """

    def __init__(self, tokens: int = 1 << 30, blocks: int = 1 << 30, ops: Ops | None = None) -> None:
        checked = checkpoint("llama")
        self.runner = make_runner(checked, ops or cpu_ops(checked), Limits(blocks=1, block_size=SIZE))
        self._decoder: Any = self.runner.model
        self.tokens, self.blocks = tokens, blocks
        self.steps: list[int] = []
        self.wanted: list[int] = []
        self.needed: int | None = None
        self._from = 0

    def fit(
        self,
        wanted: int = 60,
        limits: SchedulerConfig = STEPS,
        capture: Capture | None = captured_eagerly,
        logprobs: int | None = None,
        mixed: int = 0,
        agreed: Callable[[int], int] = int,
    ) -> FittedRunner:
        def blocks(needed: int) -> int:
            self.needed = needed
            return wanted

        room = CacheRoom(blocks, self.allocate, LONGEST, -(-LONGEST // SIZE), agreed)
        runner: ModelRunner = replace(self.runner, model=self)
        return fit(runner, limits, room, self, capture, logprobs, mixed)

    def allocate(self, blocks: int) -> list[LayerCache]:
        self.wanted.append(blocks)
        if blocks > self.blocks:
            raise torch.OutOfMemoryError(f"no memory for {blocks} blocks")
        runner = self.runner
        return allocate_caches(runner.ops, SPEC.caches, runner.layout, blocks, torch.float32, "cpu")

    def forward(self, token_ids: Tensor, *rest: Any) -> Tensor:
        if len(token_ids) > self.tokens:
            raise torch.OutOfMemoryError(f"no memory for {len(token_ids)} tokens")
        self.steps.append(len(token_ids))
        hidden: Tensor = self._decoder.forward(token_ids, *rest)
        return hidden

    def forward_split_at_attention(self, *step: Any) -> Any:
        return self._decoder.forward_split_at_attention(*step)

    def static_buffers(self, tokens: int) -> Any:
        return self._decoder.static_buffers(tokens)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)

    def free(self) -> int:
        """Return free bytes, which fall with each token that was run."""
        return (64 << 30) - sum(self.steps)

    def restart(self) -> None:
        self._from = len(self.steps)

    def peak(self) -> int:
        return 1000 * max(self.steps[self._from :])


def test_the_largest_step_and_the_largest_decode_step_are_measured():
    device = Device()
    fitted = device.fit()
    assert device.needed == 1000 * (250 + 6)
    assert device.wanted == [7, 61], "one block is the padding slot"
    assert (fitted.blocks, fitted.limits) == (60, STEPS)
    # every kind of step is run before the first real one
    assert max(device.steps[2:]) == 250
    between = [249, 240, 124, 112, 62, 48, 31, 16, 15, 7]
    assert sizes_between(6, 250) == between
    assert [tokens for tokens in device.steps if tokens in between] == between


@pytest.mark.parametrize("more", [False, True])
def test_chunks_of_long_prompts_are_measured_if_they_may_need_more_memory(monkeypatch, more):
    device, run, seen = Device(), DummySteps._run, []
    monkeypatch.setattr(type(device.runner.ops), "chunks_need_more_memory", more)

    def noted(self, chunks, *args, **kwargs):
        seen.append([(chunk.start, chunk.length) for chunk in chunks])
        run(self, chunks, *args, **kwargs)

    def peak(self):
        """Count the cached context as memory, too."""
        return max(length * (1 + start) for start, length in seen[-1])

    monkeypatch.setattr(DummySteps, "_run", noted)
    monkeypatch.setattr(Device, "peak", peak)
    device.fit(limits=SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=40))
    whole, part, decode = [(0, 39), (99, 1)], [(61, 39), (99, 1)], [(99, 1), (99, 1)]
    assert seen[: 2 + more] == [whole, *[part] * more, decode]
    assert device.needed == (39 * 62 if more else 100) + 100


class Replayed(GroupedPlan):
    """A plan of single queries for a graph that fits no other contexts."""

    sizes = ()

    def place(self) -> None:
        """There is nothing that lies elsewhere."""

    def refill(self, other: Any) -> None:
        """Dummy steps of as many rows are alike."""

    def serves(self, context_lens: Any) -> bool:
        return False


class AsOnAGpu(TorchOps):
    """Operators that plan for graphs, and fuse no layers."""

    def plan_captured(
        self, inputs: AttentionInputs, size: int, windows: frozenset[int | None], *_: Any, **__: Any
    ) -> Any:
        return Replayed(self.plan_attention(inputs, size, windows).groups, len(inputs.query_lens))


def test_the_largest_step_that_is_captured_in_pieces_is_measured_too(caplog):
    caplog.set_level("INFO")
    device = Device(ops=AsOnAGpu())
    fitted, graphs = device.fit(capture=Taped(), mixed=90), 2 * (len(SPEC.layers) + 1)
    assert fitted.runner.graph_bytes >= graphs << 20, "graphs of decode steps are included"
    assert fitted.free_bytes == device.free()
    assert "of it for graphs; 64.0 GiB are free" in caplog.text
    assert device.needed == 1000 * (250 + 6 + 90) + graphs * GRAPH_BYTES
    assert fitted.runner.mixed is not None
    assert (fitted.runner.mixed.sizes, fitted.runner.mixed.captured) == ([64, 90], graphs)


def test_ranks_agree_on_blocks_and_on_whether_steps_are_captured():
    """All ranks use the minimum of the blocks that each could allocate."""
    device = Device(ops=AsOnAGpu())
    fitted = device.fit(capture=Taped(), mixed=90, agreed=lambda count: min(count, 50))
    assert (fitted.blocks, device.wanted[-1]) == (50, 61)
    assert fitted.runner.graphs is not None
    assert fitted.runner.mixed is not None
    found = Device(ops=AsOnAGpu()).fit(capture=Taped(), mixed=90, agreed=lambda count: count - (count == 1))
    assert (found.runner.graphs, found.runner.mixed, found.blocks) == (None, None, 60)


@pytest.mark.parametrize("pieces", [False, True])
def test_a_rank_that_cannot_capture_a_step_leaves_its_group(pieces, monkeypatch):
    """Other ranks have captured the step, or wait for this rank."""
    refused, taped = Mock(side_effect=torch.OutOfMemoryError("none left")), Taped()
    if pieces:
        monkeypatch.setattr(device_fit, "GraphTables", refused)
        monkeypatch.setattr(taped, "warm_up", refused)
    device = Device(ops=AsOnAGpu())
    device.runner = replace(device.runner, in_group=True)
    with pytest.raises(torch.OutOfMemoryError, match="none left"):
        device.fit(capture=taped if pieces else refused, mixed=90 if pieces else 0)


def test_all_ranks_warm_up_with_masks_if_the_leading_rank_does():
    """Only the leading rank knows masks; other ranks run steps with masks, too."""
    leads, follows = Device(), Device()
    leads.runner = replace(
        leads.runner, sampler=replace(leads.runner.sampler, mask=ConstraintMasks(WordConstraints(0)))
    )
    leads.fit(agreed=int)
    follows.fit(agreed=lambda count: 0 if count is True else count)
    assert leads.steps == follows.steps


def test_tables_of_graphs_are_allocated_before_free_memory_is_measured(monkeypatch):
    """Block tables of graphs are allocated before free memory is measured, and are not subtracted again."""
    asked, device = [], Device(ops=AsOnAGpu())

    def made(*sizes: Any) -> GraphTables:
        asked.append((sizes[:2], device.needed))
        return GraphTables(*sizes)

    monkeypatch.setattr(device_fit, "GraphTables", made)
    device.fit()
    assert asked == [((1, 6 * -(-LONGEST // SIZE)), None)]
    assert device.needed == 1000 * (250 + 6)


def test_decode_steps_are_eager_without_memory_for_tables_of_graphs(monkeypatch, caplog):
    """Block tables may be long, and a cache of a requested size may leave too little memory."""
    none_left = Mock(side_effect=torch.OutOfMemoryError("no memory for block tables"))
    monkeypatch.setattr(device_fit, "GraphTables", none_left)
    device = Device(ops=AsOnAGpu())
    fitted = device.fit()
    assert (fitted.runner.graphs, fitted.blocks, device.needed) == (None, 60, 1000 * (250 + 6))
    assert "capture decode steps of 6 rows" in caplog.text


def test_a_step_for_which_there_is_no_memory_is_halved_and_the_fitted_runner_runs(caplog):
    device, limits = Device(tokens=70), Limits(budget=64, blocks=60, block_size=SIZE)
    fitted = device.fit()
    assert fitted.limits.max_num_batched_tokens == fitted.runner.most_tokens == 50
    assert device.needed == 1000 * (50 + 6)
    assert "too little memory for a step of 250 tokens of 6 rows" in caplog.text
    assert "steps now have at most 50 tokens" in caplog.text
    plain = make_runner(checkpoint("llama"), device.runner.ops, limits)
    requests, eos = greedy([[1, 2, 3], [5] * 40, [7] * 30], 9), frozenset(SPEC.eos_token_ids)
    got, wanted = (drain(make_engine(runner, limits, eos), requests) for runner in (fitted.runner, plain))
    assert got.answers == wanted.answers


@pytest.mark.parametrize(
    ("tokens", "blocks", "said"),
    [(0, 60, "no memory for a step of one token"), (300, 13, "KV cache of 13 blocks")],
)
def test_a_device_that_holds_no_token_or_not_the_longest_sequence_is_an_error(tokens, blocks, said):
    with pytest.raises(OutOfMemory, match=said):
        Device(tokens, blocks).fit(wanted=blocks)


def test_a_cache_that_cannot_be_had_is_made_smaller(caplog):
    device = Device(blocks=50)
    fitted = device.fit()
    assert 45 < fitted.blocks <= 49
    assert device.wanted[-1] == fitted.blocks + 1
    assert "the device had no memory for 60" in caplog.text


def test_memory_of_steps_is_subtracted_from_the_share_of_the_cache():
    # bytes of a block, its tokens, the longest row, sequences
    sizes = (1000, TableSizes(16), JobSize(64, 1000, 250))
    assert cache_blocks(*sizes, None, 100_000, "cpu", 30_000) == 10
    assert cache_blocks(*sizes, 0.5, 100_000, "cuda", 30_000) == 20
    assert cache_blocks(*sizes, 40_000, 100_000, "cuda", 30_000) == 40, "bytes of the job file"
    with pytest.raises(OutOfMemory, match="lower max_tokens"):
        cache_blocks(*sizes, 0.5, 100_000, "cuda", 48_000)


@pytest.mark.parametrize(("free", "kept"), [(4 << 30, 0.15), (8 << 30, 0.09), (64 << 30, 0.03)])
def test_the_cache_of_a_gpu_gets_all_memory_except_the_reserve(free, kept):
    """Measured memory of steps is subtracted once; the reserve and a small share remain."""
    sizes = (1 << 20, TableSizes(16), JobSize(4096, 100_000, 8192))
    needed = free // 8
    left = free - needed - (cache_blocks(*sizes, None, free, "cuda", needed) << 20)
    assert GPU_RESERVE <= left - free * GPU_RESERVE_SHARE < GPU_RESERVE + (2 << 20)
    assert left < kept * free
    with pytest.raises(OutOfMemory, match="0 bytes may be used"):
        cache_blocks(*sizes, None, GPU_RESERVE, "cuda", 0)


def test_dummy_steps_have_the_maximum_size():
    dummy = DummySteps(Device().fit().runner, STEPS, LONGEST, 60)
    chunks = dummy.chunks(250, 6, LONGEST, COSTLY)
    assert [c.length for c in chunks] == [100, 100, 47, 1, 1, 1]
    assert all(c.samples and c.end <= LONGEST for c in chunks)
    assert [c.end for c in chunks[3:]] == [LONGEST] * 3
    assert [c.length for c in dummy.chunks(4, 4, 1, GREEDY)] == [1] * 4
    assert sum(c.length for c in dummy.chunks(10_000, 6, LONGEST, GREEDY)) == 600


def test_the_largest_step_has_the_logprobs_that_rows_ask_for(monkeypatch):
    """Their copy of the logits is measured, and their kernel is compiled before the first timed step."""
    asked, device = [], Device()

    def noted(_: object, logits: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        asked.append((len(logits), rest[-1]))
        return log_probabilities_reference(logits, *rest)

    monkeypatch.setattr(type(device.runner.ops), "log_probabilities", noted)
    device.fit()
    assert asked == []
    device.fit(logprobs=7)
    assert asked == [(6, 7)] * 3, "two steps are measured, one warms up"


@pytest.mark.parametrize(("capture", "times"), [(captured_eagerly, 2), (None, 1)])
def test_memory_that_dummy_steps_do_not_use_is_counted(capture, times):
    class Sharing(AsOnAGpu):
        def spare_bytes(self, rows: int, longest: int, device: torch.device, queries: int = 1) -> int:
            return 10_000 * rows + longest

    device = Device(ops=Sharing())
    fitted = device.fit(capture=capture)
    assert (fitted.runner.graphs is None) == (capture is None)
    assert device.needed == 1000 * (250 + 6) + times * (60_000 + LONGEST)


def test_measured_steps_and_the_warm_up_have_masks_if_constraints_are_supported(monkeypatch):
    """Otherwise the memory of masks would not be counted, and the first constrained row would wait for a
    kernel to compile."""
    device, masked = Device(), []
    for name in ("mask", "masked_argmax"):
        real = getattr(CpuOps, name)

        def watched(self: CpuOps, *tensors: Tensor, name: str = name, real: Any = real) -> Any:
            masked.append((name, len(tensors[-1]), bool((tensors[-1] == -1).all())))
            return real(self, *tensors)

        monkeypatch.setattr(CpuOps, name, watched)
    device.fit()
    assert masked == []
    sampler = replace(device.runner.sampler, mask=ConstraintMasks(WordConstraints(0)))
    device.runner = replace(device.runner, sampler=sampler)
    device.fit()
    measured = [("mask", 6, True)] * 2
    assert masked == [*measured, ("mask", 6, True), ("masked_argmax", 6, True)], "no constraint is asked"


def test_dummy_tokens_are_written_to_the_padding_block():
    dummy = DummySteps(Device().fit().runner, STEPS, LONGEST, 60)
    for shared in (False, True):
        chunks = dummy.chunks(250, 6, LONGEST, GREEDY, shared)
        written = {c.sequence.tables[0][at // SIZE] for c in chunks for at in range(c.start, c.end)}
        assert written == {60}
        assert len({c.sequence.tables[0][0] for c in chunks[3:]}) == (1 if shared else 3)


def test_the_warm_up_runs_steps_with_an_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm-up has the usual sizes and a short prompt. The step whose memory is measured has an adapter,
    too."""
    checked = checkpoint("llama")
    runner = make_runner(
        checked, cpu_ops(checked), Limits(blocks=61, block_size=SIZE), adapters=adapters("llama")
    )
    seen: list[tuple[int, bool]] = []
    given = runner.model.forward

    def forward(token_ids: Tensor, inputs: Any, *rest: Any) -> Tensor:
        seen.append((len(token_ids), inputs[0].adapters is not None))
        return given(token_ids, inputs, *rest)

    monkeypatch.setattr(runner.model, "forward", forward)
    steps = DummySteps(device_fit.with_cache(runner, runner.caches), STEPS, LONGEST, 60)
    steps.warm_up()
    sizes = sizes_between(steps.rows, STEPS.max_num_batched_tokens)
    assert {size for size, adapted in seen if adapted} >= {*sizes, steps.rows}
    assert {size for size, adapted in seen if not adapted} >= {*sizes, steps.rows, 8}
    assert steps.costly.adapter == "one"
