"""Times steps of two small models with random weights, to fit the forecast's model of step times to this CPU.

The wide model is bound by reading weights, the narrow model by the operators between the matrix products.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import EngineConfig, LoadConfig
from batchinfer.engine.load.build import load_model
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.schedule.step_shape import step_shape
from batchinfer.machine.garbage import freeze_existing_objects
from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import SHAPES
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.parameters import parameter_count
from batchinfer_kernels.arithmetic import Dtype, Quantization
from batchinfer_kernels.cost import ModelCost, StepShape

LONGEST = 1280  # tokens of a sequence
KV_MEMORY = 256 << 20  # bytes: more than any step below needs, and larger than the caches of a CPU
# A step is timed at least MIN_RUNS times, then until it has taken MIN_TOTAL_S seconds or MAX_RUNS runs
MIN_RUNS, MAX_RUNS, MIN_TOTAL_S = 3, 9, 0.25

# Start and length of a chunk
Part = tuple[int, int]
_PROMPTS: tuple[list[Part], ...] = (
    [(0, 32)],
    [(0, 128)],
    [(0, 512)],
    [(0, 128)] * 4,
    [(0, 1024)],
    [(0, 32)] * 32,
    [(512, 128)] * 4,
)
_DECODES = (
    (1, 32),
    (1, 1024),
    (4, 64),
    (8, 128),
    (16, 64),
    (16, 1024),
    (24, 100),
    (32, 200),
    (64, 64),
    (64, 512),
    (128, 256),
    (256, 64),
    (256, 200),
)
_MIXED: tuple[list[Part], ...] = ([(200, 1)] * 128 + [(0, 384)], [(256, 1)] * 32 + [(512, 480)])
# Number and tokens of the steps that time the first use of cache memory
FIRST_USES, FIRST_USE_TOKENS = 8, 2048
HOST_RUNS = ((256, 12), (64, 20), (8, 30))  # rows, and tokens per answer


@dataclass(frozen=True, slots=True)
class Calibration:
    """Times that were measured on this machine's CPU, to fit the forecast's model of step times.

    Attributes:
        steps: Per step: (costs of the model, shape of the step, number of rows, seconds that the model took).
        host: Per step: (number of rows, seconds that the engine took outside of the model).
        first_use_s: The additional seconds per byte of KV cache when memory is written for the first time.
    """

    steps: list[tuple[ModelCost, StepShape, int, float]]
    host: list[tuple[int, float]]
    first_use_s: float = 0.0


def calibrate(dtype: Dtype, quantization: Quantization) -> Calibration:
    """Time steps of two small models with random weights on this machine's CPU.

    The forecast's model of step times is fitted to the results.

    Args:
        dtype: The dtype of the models.
        quantization: How the weights of the models are quantised.

    Raises:
        Unavailable: The CPU operators do not support this dtype or quantization.
    """
    found, first_use_s = Calibration([], []), 0.0
    for config in (_WIDE, _NARROW):
        loaded = _loaded(config, dtype, quantization)
        with freeze_existing_objects():
            found.steps.extend(_timed(loaded, parts) for parts in _steps())
            if config is _NARROW:
                first_use_s = _first_use_s(loaded)
                for rows, tokens in HOST_RUNS:
                    found.host.extend(_host_times(loaded, rows, tokens))
    return replace(found, first_use_s=first_use_s)


def _shape(
    hidden: int, intermediate: int, heads: int, kv_heads: int, layers: int, vocab: int
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate, "vocab_size": vocab}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    return {**SHAPES["tiny"], **sizes, **heads_of, "num_hidden_layers": layers}


_WIDE = _shape(768, 2048, 12, 4, 3, 16_000)
_NARROW = _shape(256, 640, 4, 2, 4, 2_048)


def _loaded(config: dict[str, Any], dtype: Dtype, quantization: Quantization) -> LoadedModel:
    spec = parse_config(config, {}, Path("calibration") / "config.json").quantized(quantization)
    source = ModelSource(spec, parameter_count(spec), lambda dtype, device: DummyWeights(spec, dtype, device))
    settings = EngineConfig(
        LoadConfig(Path("calibration"), dtype, "cpu", quantization=quantization),
        max_model_len=LONGEST,
        longest=LONGEST,
        kv_memory=KV_MEMORY,
    )
    return load_model(settings, source)


def _steps() -> Iterator[list[Part]]:
    yield from _PROMPTS
    yield from ([(context, 1)] * rows for rows, context in _DECODES)
    yield from _MIXED


def _timed(loaded: LoadedModel, parts: list[Part]) -> tuple[ModelCost, StepShape, int, float]:
    # The lower quartile of several runs: other work on the machine makes a run slower, never faster
    # (docs/measurements/scheduling.md)
    runner = loaded.runner
    chunks = _chunks(loaded, parts)
    step, sampling = Step(chunks), [chunk.sequence for chunk in chunks if chunk.samples]
    shape, writer = step_shape(chunks, len(sampling), 0, runner.layout), PlanWriter()
    runner.launch(writer.of(step, sampling)).tokens()
    took: list[float] = []
    while len(took) < MIN_RUNS or (sum(took) < MIN_TOTAL_S and len(took) < MAX_RUNS):
        began = time.perf_counter()
        runner.launch(writer.of(step, sampling)).tokens()
        took.append(time.perf_counter() - began)
    return runner.cost, shape, len(chunks), sorted(took)[len(took) // 4]


def _first_use_s(loaded: LoadedModel) -> float:
    runner, block = loaded.runner, loaded.runner.layout.block_size
    blocks = FIRST_USE_TOKENS // block
    last = loaded.info.blocks - FIRST_USES * blocks  # unused so far: earlier steps took blocks from 0 on
    took: list[list[float]] = []
    for number in range(FIRST_USES):
        chunks = _chunks(loaded, [(0, FIRST_USE_TOKENS // 4)] * 4, last + number * blocks)
        step, sampling = Step(chunks), [chunk.sequence for chunk in chunks if chunk.samples]
        writer = PlanWriter()
        took.append([])
        for _ in range(MIN_RUNS):
            began = time.perf_counter()
            runner.launch(writer.of(step, sampling)).tokens()
            took[-1].append(time.perf_counter() - began)
    size = sum(bytes_ for _, bytes_ in runner.cost.caches) * FIRST_USE_TOKENS
    return max(0.0, sum(first - min(again) for first, *again in took)) / (size * FIRST_USES)


def _chunks(loaded: LoadedModel, parts: list[Part], first: int = 0) -> list[Chunk]:
    layout, blocks = loaded.runner.layout, loaded.info.blocks
    chunks = []
    for row, (start, length) in enumerate(parts):
        params = SamplingParams(ignore_eos=True)
        request = Request(row.to_bytes(32, "little"), np.full(start + length, 5, np.int32), params)
        sequence = Sequence.of(request, ContentRoots(LONGEST), None, 0.0)
        # The tokens before `start` are never computed: the contents of the cache do not change the time of attention
        needed = -(-(start + length) // layout.block_size)
        table = [block % blocks for block in range(first, first + needed)]
        sequence.tables = [list(table) for _ in layout.groups]
        first += needed
        chunks.append(Chunk(sequence, start, length))
    return chunks


def _host_times(loaded: LoadedModel, rows: int, tokens: int) -> list[tuple[int, float]]:
    draw = random.Random(rows)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = ([draw.randrange(5, 2000) for _ in range(32)] for _ in range(rows))
    requests = [
        Request(row.to_bytes(32, "little"), np.array(prompt, np.int32), params)
        for row, prompt in enumerate(prompts)
    ]
    engine = loaded.engine()
    engine.add(requests)
    samples = [sample for output in engine.drain() for sample in output.samples]
    return [(sample.sampled_tokens, sample.duration_s - sample.model_s) for sample in samples]
