"""Measures the host's time to schedule, build, launch and retire a decode step, without CUDA calls and a
model.

python -m tests.batchinfer.engine.host_work [ROWS PROMPT [SHARED [LONGEST [ENDS [STEPS]]]]]

The engine, scheduler, runner, graphs and attention plans are the real ones; a graph's replay does nothing.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.kernels.gpu import interpreter

if interpreter.is_wanted():  # attention is planned for a GPU, and none may be here
    interpreter.switch_on()

import torch
from torch import Tensor

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.graphs.decode_graphs import DecodeGraphs
from batchinfer.engine.graphs.graph_capture import CapturedFunction
from batchinfer.engine.kv.kv_cache import BlockPool
from batchinfer.engine.loop.engine import Engine, EngineLimits
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.scheduler import Scheduler, SchedulerConfig
from batchinfer.engine.tensors.device_tables import DeviceTables, GraphTables
from batchinfer.engine.tensors.graph_inputs import GraphSize
from batchinfer.models.ops.triton_ops import TritonOps
from batchinfer_kernels.gpu.attention_plan import AttentionShape
from tests.batchinfer.engine.small_engine import at_once, layer_each
from tests.model_costs import llama_cost

BLOCK, LONGEST, VOCAB, BUDGET = 16, 32_768, 1000, 8192
SHAPE = AttentionShape(torch.bfloat16, 32, 8, 128)
STEPS = 40


@dataclass(frozen=True)
class Load:
    """The rows of a decode benchmark.

    Attributes:
        rows: number of rows.
        prompt: tokens per prompt.
        shared: number of leading tokens that all prompts share.
        longest: tokens of the first row's prompt.
        ends: number of rows that end per timed step.
        at_once: number of steps that one launch runs.
    """

    rows: int
    prompt: int
    shared: int = 0
    longest: int = 0
    ends: int = 0
    at_once: int = 1

    def requests(self, most: int) -> list[Request]:
        """Return the rows' requests, with `most` tokens each."""
        draw = np.random.default_rng(0)
        alike = draw.integers(5, VOCAB, self.shared)
        lengths = [max(self.longest, self.prompt), *[self.prompt] * (self.rows - 1)]
        params = SamplingParams(max_tokens=most)
        prompts = (np.concatenate([alike, draw.integers(5, VOCAB, n - self.shared)]) for n in lengths)
        return [Request(i.to_bytes(32, "big"), p.astype(np.int32), params) for i, p in enumerate(prompts)]


LOADS = (
    Load(256, 512),
    Load(256, 2048),
    Load(1024, 512),
    Load(1024, 2048),
    Load(256, 640, shared=512),
    Load(256, 640, shared=512, longest=20_000),
    Load(1024, 640, shared=512),
    Load(256, 512, ends=1),
    Load(256, 640, longest=20_000, ends=1),
    Load(1024, 512, ends=1),
    Load(1024, 2048, ends=1),
    Load(1024, 640, longest=20_000, ends=1),
)
EOS = 2


class NoModel:
    """A model that always returns token 7, except for `ends` rows per step, which get EOS in turn."""

    def __init__(self) -> None:
        self.ends, self._steps = 0, 0

    def forward(self, token_ids: Tensor, *_: Any) -> Tensor:
        return torch.zeros(len(token_ids), 1)

    def states(self, hidden: Tensor) -> Tensor:
        return hidden

    def argmax(self, hidden: Tensor) -> Tensor:
        tokens = torch.full((len(hidden),), 7)
        self._steps += 1
        for number in range(self.ends):
            tokens[(7 * self._steps + 31 * number) % len(tokens)] = EOS
        return tokens

    def logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("greedy rows need no logits")


class MovedByNobody(TritonOps):
    """Skips a kernel that the host launches between replays, which the interpreter would run."""

    def advance_rows(self, *_: Any) -> None:
        """Leave the rows unchanged."""


class LaidByNobody(DeviceTables):
    """Skips writing block tables, as the host of a GPU only launches that kernel."""

    def write(self, *_: Any) -> None:
        """Leave the tensors unchanged."""


def _captured(run: Any) -> CapturedFunction:
    return CapturedFunction(run(), lambda: None)


def make_engine(load: Load, most: int, model: NoModel | None = None) -> Engine:
    """Return an engine as for a GPU, with tensors in host memory."""
    device, layout = torch.device("cpu"), layer_each([None], BLOCK)
    needed = load.rows * -(-(load.prompt + most) // BLOCK) + -(-(load.longest + most) // BLOCK) + 1
    ops = MovedByNobody(SHAPE)
    largest = GraphSize(load.rows, LONGEST, BLOCK, padding_slot=needed * BLOCK)
    model = model or NoModel()
    tables = GraphTables(1, largest.table_entries, device)
    graphs = DecodeGraphs(lambda ids, *_: model.forward(ids), ops, largest, layout.groups, tables, _captured)
    sizes = {"layers": 32, "hidden": 4096, "intermediate": 14_336, "q_heads": 32, "kv_heads": 8}
    cost = llama_cost(**sizes, head_dim=128, vocab=128_256, itemsize=2, weight_itemsize=2)
    sampler = Sampler(frozenset([EOS]))
    runner = DeviceRunner(model, ops, [], layout, sampler, cost, device, graphs=graphs, tables=LaidByNobody())
    scheduler = Scheduler(SchedulerConfig(load.rows, BUDGET), BlockPool(needed, BLOCK))
    limits = EngineLimits(ContentRoots(LONGEST), frozenset([EOS]))
    return Engine(runner, scheduler, limits, repeated=at_once(load.at_once))


def decoding(load: Load, most: int, model: NoModel | None = None) -> Engine:
    """Return an engine whose rows all decode, with up to `most` tokens each."""
    engine = make_engine(load, most, model)
    engine.add(load.requests(most))
    while (sample := engine.step().sample) is None or sample.decode_tokens < load.rows:
        pass
    return engine


def decode_steps(load: Load, steps: int = STEPS) -> Iterator[float]:
    """Yield the seconds per step while all rows decode, after a warm-up. A launch of n steps counts as n."""
    reading = load.rows * load.prompt // BUDGET
    most = 200 + (steps + 9) * load.at_once + reading  # no row ends while others are still read
    model = NoModel()
    engine = decoding(load, most, model)
    model.ends = load.ends
    for _ in range(5):
        engine.step()
    gc.collect()
    gc.freeze()
    for _ in range(steps):
        began = time.perf_counter()
        samples = engine.step().samples
        assert len(samples) == load.at_once
        for sample in samples:
            assert 0 <= load.rows - sample.decode_tokens <= 2 * load.ends * load.at_once * (steps + 5)
        yield (time.perf_counter() - began) / len(samples)


def main(*arguments: str) -> None:
    """Print the median and minimum time of each load in milliseconds."""
    torch.set_num_threads(1)  # copies that a GPU would make itself do not wait for another core
    loads = (Load(*map(int, arguments)),) if arguments else LOADS
    for load in loads:
        times = sorted(decode_steps(load))
        print(f"{load}: median {1000 * statistics.median(times):.2f} ms, least {1000 * times[0]:.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
