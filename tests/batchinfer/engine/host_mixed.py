"""How long the host takes to launch a layer of a step that reads prompts, operator by operator and in pieces.

    python -m tests.batchinfer.engine.host_mixed

The decoder, its operators, the runner, attention plans and the graphs' bookkeeping are the real ones. What Triton and
CUDA do is left out: kernels and replays do nothing, and products are of few numbers, on the CPU. What a layer takes is
what a step of more layers takes longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.kernels.gpu import interpreter

if interpreter.is_wanted():
    interpreter.switch_on()

import torch
from triton.runtime.interpreter import InterpretedFunction

from batchinfer.core.content_root import ContentRoots
from batchinfer.engine.graphs.graph_capture import GraphRecorder, R, Replay
from batchinfer.engine.graphs.piecewise_graphs import PiecewiseGraphs
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import SHAPES
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.decoder.packed import pack_weights
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer.models.spec.model_cost import model_cost
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.engine.small_engine import greedy

FEW, MANY, STEPS = 2, 10, 100  # layers, and steps of each
CHUNK, ROWS, CONTEXT, BLOCK = 48, 16, 96, 16  # a prompt of CHUNK tokens beside ROWS rows that decode


class Silent(GraphRecorder):
    """Replays launch nothing."""

    @property
    def taken_bytes(self) -> int:
        return 0

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        return run(), lambda: None


@contextmanager
def counted_launches() -> Iterator[list[str]]:
    """Kernels compute nothing; the names of those launched."""
    run, names = InterpretedFunction.run, []

    def nothing(kernel: Any, *_: Any, **__: Any) -> None:
        names.append(kernel.fn.__name__)

    InterpretedFunction.run = nothing
    try:
        yield names
    finally:
        InterpretedFunction.run = run


def make_runner(layers: int, pieces: bool) -> DeviceRunner:
    """Of a model of Llama's kind with so many layers."""
    config = {**SHAPES["tiny"], "num_hidden_layers": layers, "hidden_size": 16, "intermediate_size": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 64}
    spec = parse_config({**config, **heads}, {}, Path("host") / "config.json")
    device = torch.device("cpu")
    ops = TritonOps(AttentionShape(torch.float32, 4, 1, 4))
    packed = pack_weights(spec, DummyWeights(spec, torch.float32, device), ops, device)
    decoder = Decoder(packed, ops, 2 * CONTEXT)
    layout = cache_layout(spec.caches, BLOCK, 2 * CONTEXT)
    blocks = (ROWS + 1) * -(-CONTEXT // BLOCK)
    caches = allocate_caches(ops, spec.caches, layout, blocks + 1, torch.float32, device)
    sampler = Sampler(frozenset([2]))
    runner = DeviceRunner(decoder, ops, caches, layout, sampler, model_cost(spec, 4), device)
    if not pieces:
        return runner
    buffers = decoder.static_buffers(64)
    mixed = PiecewiseGraphs(decoder, caches, 1, blocks * BLOCK, buffers, Silent())
    mixed.capture()
    return replace(runner, mixed=mixed)


def mixed_step() -> Step:
    """The prompt's tokens do not reach its end, so that nothing is sampled of it."""
    parts = [(0, CHUNK), *[(CONTEXT - 1, 1)] * ROWS]
    chunks = []
    for request, (start, length) in zip(greedy([[5] * CONTEXT] * len(parts), 9), parts, strict=True):
        sequence = Sequence.of(request, ContentRoots(2 * CONTEXT), None, 0.0)
        first = len(chunks) * CONTEXT // BLOCK
        sequence.tables = [list(range(first, first + CONTEXT // BLOCK))]
        chunks.append(Chunk(sequence, start, length))
    return Step(chunks)


def seconds(runner: DeviceRunner, steps: int = STEPS) -> list[float]:
    """Of each step's forward pass, sampling included, ascending."""
    step, writer, found = mixed_step(), PlanWriter(), []
    sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
    for _ in range(steps):
        began = time.perf_counter()
        runner.launch(writer.of(step, sampling))
        found.append(time.perf_counter() - began)
    return sorted(found)


def layer_launches(pieces: bool) -> list[str]:
    """The kernels of ours that the host launches for one layer."""
    with counted_launches() as names, torch.inference_mode():
        found = []
        for layers in (1, 2):
            runner = make_runner(layers, pieces)
            names.clear()
            step = mixed_step()
            sampling = [chunk.sequence for chunk in step.chunks if chunk.samples]
            runner.launch(PlanWriter().of(step, sampling))
            found.append(list(names))
    once, twice = found
    return twice[: len(twice) - len(once)]


def main() -> None:
    """Print what a layer takes, and what the rest of a step does, in microseconds."""
    for pieces in (False, True):
        with counted_launches(), torch.inference_mode():
            few, many = (seconds(make_runner(layers, pieces)) for layers in (FEW, MANY))
        for name, pick in (("median", statistics.median), ("least", min)):
            layer = (pick(many) - pick(few)) / (MANY - FEW)
            rest = pick(few) - FEW * layer
            way = "in pieces" if pieces else "by operators"
            print(f"{way}, {name}: a layer {1e6 * layer:.0f} µs, rest {1e6 * rest:.0f}")
        print("  our kernels launched for a layer:", ", ".join(layer_launches(pieces)))


if __name__ == "__main__":
    main()
