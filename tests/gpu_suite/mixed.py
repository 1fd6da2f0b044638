"""Steps that read prompts beside rows that decode, in pieces and operator by operator: of the device's time and of the
host's, at several sizes."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.runner.device_runner import DeviceRunner
from batchinfer.engine.schedule.budget import LAUNCH_LAYER_S, REPLAY_LAYER_S
from batchinfer.engine.schedule.scheduler import Chunk
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.batch import host_batch
from tests.gpu_suite.case import WrongResult, distance, the_clock
from tests.gpu_suite.clock import wait_for
from tests.gpu_suite.loaded import loaded_model, model_name
from tests.gpu_suite.section import Part, Section
from tests.gpu_suite.workloads import FIRST_ID

ROWS, CONTEXT = 128, 512  # rows that decode, and their tokens; prompts are as long
PROMPT_TOKENS = (64, 384, 896, 2048)  # of a step, beside the rows
TINY_ROWS, TINY_CONTEXT, TINY_TOKENS = 2, 9, (7,)
HOST_RUNS = 5
# ‖difference‖ / ‖hidden‖ of a row: products of another number of rows are rounded otherwise, layer upon layer, and what
# is not a number, or another row's, is 1 away and more
TOLERANCE, TINY_TOLERANCE = 0.25, 1e-4


def run(section: Section) -> None:
    """A result a size."""
    section.parts(list(_parts(section)))


def _parts(section: Section) -> Iterator[Part]:
    for tokens in TINY_TOKENS if section.setting.rehearsal else PROMPT_TOKENS:
        yield f"{tokens} tokens of prompts", partial(_measured, section, tokens)


def _measured(section: Section, tokens: int) -> dict[str, Any]:
    """Both ways give the same hidden states. Raises WrongResult where they do not, and where no such step is
    captured."""
    loaded, tiny = loaded_model(section.setting), section.setting.rehearsal
    runner = loaded.runner
    rows, context = (TINY_ROWS, TINY_CONTEXT) if tiny else (ROWS, CONTEXT)
    if not isinstance(runner, DeviceRunner) or runner.mixed is None:
        raise WrongResult("no steps are captured in pieces")
    if not runner.mixed.covers(1 + rows):
        raise WrongResult(f"no steps of {1 + rows} tokens are captured in pieces: {runner.mixed.sizes}")
    tokens = min(tokens, runner.mixed.sizes[-1] - rows)  # a slow GPU is kept busy by fewer
    apart = replace(runner, mixed=None)
    chunks = _filled(apart, tokens, rows, context, loaded.limits.max_num_batched_tokens)
    ways = {"in pieces": runner, "by operators": apart}
    error = _error(*(_hidden(way, chunks) for way in ways.values()))
    tolerance = TINY_TOLERANCE if tiny else TOLERANCE
    if not error <= tolerance:
        raise WrongResult(f"in pieces a row is {error:.3g} away, where {tolerance:.3g} would do")
    layers = runner.cost.layers
    told: dict[str, Any] = {"kind": "mixed", "model": model_name(section.setting), "layers": layers}
    told |= {"tokens": tokens, "rows": rows, "error": error}
    times = the_clock(section.setting.device).times(
        {name: partial(way.launch, chunks) for name, way in ways.items()}
    )
    hosts = {name: _host_s(way, chunks) for name, way in ways.items()}
    found = {
        name: {**times[name].to_json(), "host_s": hosts[name], "host_layer_s": hosts[name] / layers}
        for name in ways
    }
    return {**told, "ways": found, "assumed_layer_s": [REPLAY_LAYER_S, LAUNCH_LAYER_S]}


def _filled(runner: DeviceRunner, tokens: int, rows: int, context: int, most: int) -> list[Chunk]:
    """A step of `tokens` tokens of prompts and of `rows` rows, whose contexts are in the cache, each in blocks of its
    own."""
    block, r = runner.layout.block_size, random.Random(tokens)
    lengths = [context] * rows + [min(context, tokens - at) for at in range(0, tokens, context)]
    first, sequences = 0, []
    for number, length in enumerate(lengths):
        prompt = np.array([r.randrange(FIRST_ID, FIRST_ID + 200) for _ in range(length)], np.int32)
        request = Request(number.to_bytes(32, "big"), prompt, SamplingParams(ignore_eos=True))
        sequence, blocks = Sequence.of(request, length + 1, None, 0.0), -(-length // block)
        sequence.tables = [list(range(first, first + blocks)) for _ in runner.layout.groups]
        first += blocks
        sequences.append(sequence)
    decoding = sequences[:rows]
    for at in range(0, rows, each := max(1, most // context)):
        runner.launch([Chunk(sequence, 0, context - 1) for sequence in decoding[at : at + each]])
    steps = [Chunk(sequence, context - 1, 1) for sequence in decoding]
    return steps + [Chunk(sequence, 0, len(sequence.tokens)) for sequence in sequences[rows:]]


@torch.inference_mode()
def _hidden(runner: DeviceRunner, chunks: list[Chunk]) -> Tensor:
    hidden, *_ = runner._forward(host_batch(chunks, runner.layout, runner.rows))
    return hidden.clone()


def _error(ours: Tensor, right: Tensor) -> float:
    """Of the row that is farthest away."""
    found = [distance(mine, row) for mine, row in zip(ours.cpu(), right.cpu(), strict=True)]
    return max(found, key=lambda error: float("inf") if error != error else error)


def _host_s(runner: DeviceRunner, chunks: list[Chunk]) -> float:
    """Of queueing the step while nothing else is queued."""
    found = []
    for _ in range(HOST_RUNS):
        wait_for(runner.device)
        began = time.perf_counter()
        runner.launch(chunks)
        found.append(time.perf_counter() - began)
    return statistics.median(found)
