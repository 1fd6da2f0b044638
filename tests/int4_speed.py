"""What weights in int4 give a CPU beside int8: decode steps of one model in turns, beside what the cost model allows.

    python -m tests.int4_speed [--model qwen2.5-0.5b] [--rows 1 4 8 128] [--rounds 7] [--threads N]

Random weights, bfloat16 activations, contexts of CONTEXT tokens; medians of the rounds, in which the kinds take turns,
each after a step that is not counted. `allowed`: the ratio of the bounds; `of bound`: the roofline of a step, by its
costs at the bandwidth and the peaks (of int8 and bfloat16) that were measured right before and after, ÷ its time. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import cache_layout
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.runner.sampler import Sampler
from batchinfer.engine.schedule.plan_writer import PlanWriter
from batchinfer.engine.schedule.scheduler import Chunk, Step
from batchinfer.engine.schedule.sequence import Sequence
from batchinfer.engine.tensors.device_memory import allocate_caches
from batchinfer.models.checkpoint.config import parse_config
from batchinfer.models.checkpoint.dummy import DummyWeights
from batchinfer.models.checkpoint.shapes import SHAPES
from batchinfer.models.decoder.decoder import Decoder
from batchinfer.models.ops.choose import Arithmetic
from batchinfer.models.ops.peaks import MeasuredPeaks, measure_peaks
from batchinfer.models.sources import ModelSource
from batchinfer.models.spec.parameters import parameter_count
from batchinfer_kernels.arithmetic import Quantization
from batchinfer_kernels.cost import Peaks, StepShape, roofline_seconds

KINDS: tuple[Quantization, ...] = ("int8", "int4")
CONTEXT, BLOCK = 64, 16


def runner_of(model: str, quantization: Quantization, rows: int) -> ModelRunner:
    """Load a model of random weights as a job does, with a cache for so many rows."""
    raw: dict[str, Any] = {**SHAPES[model]}
    spec = parse_config(raw, {}, Path(model) / "config.json").quantized(quantization)
    arithmetic = Arithmetic(torch.bfloat16, torch.device("cpu"))
    source = ModelSource(spec, parameter_count(spec), lambda *place: DummyWeights(spec, *place))
    ops = source.choose_ops(arithmetic)
    decoder = source.load(ops, arithmetic)(ops, 2 * CONTEXT)
    assert isinstance(decoder, Decoder)
    layout = cache_layout(spec.caches, BLOCK, 2 * CONTEXT)
    caches = allocate_caches(ops, spec.caches, layout, rows * CONTEXT // BLOCK, torch.bfloat16, "cpu")
    sampler, cost = Sampler(frozenset([2])), source.cost(arithmetic)
    return ModelRunner(decoder, ops, caches, layout, sampler, cost, arithmetic.device)


def decoding(rows: int) -> Step:
    """A step in which each row decodes a token, in blocks of its own."""
    params, chunks = SamplingParams(ignore_eos=True), []
    for row in range(rows):
        tokens = torch.full((CONTEXT,), 5 + row % 50, dtype=torch.int32).numpy()
        request = Request(row.to_bytes(32, "little"), tokens, params)
        sequence = Sequence.of(request, ContentRoots(2 * CONTEXT), None, 0.0)
        first = row * CONTEXT // BLOCK
        sequence.tables = [list(range(first, first + CONTEXT // BLOCK))]
        chunks.append(Chunk(sequence, CONTEXT - 1, 1))
    return Step(chunks)


def timed(runner: ModelRunner, rows: int) -> float:
    """Return the seconds of a step, after one that is not counted."""
    took = 0.0
    for _ in range(2):
        step = decoding(rows)
        plan = PlanWriter(runner.sampler.eos_token_ids).of(step, [chunk.sequence for chunk in step.chunks])
        began = time.perf_counter()
        runner.launch(plan).tokens()
        took = time.perf_counter() - began
    return took


def peaks_of(*found: MeasuredPeaks) -> Peaks:
    """Return the better of each."""
    flops = {name: max(each.peak_flops[name] for each in found) for name in ("bfloat16", "int8")}
    return Peaks(flops["bfloat16"], max(each.bandwidth for each in found), flops["int8"])


def bound_s(runner: ModelRunner, rows: int, peaks: Peaks) -> float:
    layers = runner.cost.layers
    read = layers * rows * CONTEXT
    return roofline_seconds(runner.cost.step(StepShape(rows, rows, read, read)), peaks)


def measured(model: str, each: list[int], rounds: int) -> dict[str, Any]:
    """Return the seconds of steps, and their bounds."""
    runners = {kind: runner_of(model, kind, max(each)) for kind in KINDS}
    before = measure_peaks("cpu", ("bfloat16", "int8"))
    times: dict[int, dict[str, list[float]]] = {rows: {kind: [] for kind in KINDS} for rows in each}
    for _ in range(rounds):
        for rows in each:
            for kind, runner in runners.items():
                times[rows][kind].append(timed(runner, rows))
    peaks = peaks_of(before, measure_peaks("cpu", ("bfloat16", "int8")))
    found: dict[str, Any] = {
        "model": model, "threads": torch.get_num_threads(), "rounds": rounds, "bytes_per_s": peaks.bytes_per_s,
        "int8_ops_per_s": peaks.coded_ops_per_s, "flops_per_s": peaks.flops_per_s, "rows": {},
    }  # fmt: skip
    for rows in each:
        took = {kind: statistics.median(times[rows][kind]) for kind in KINDS}
        least = {kind: bound_s(runners[kind], rows, peaks) for kind in KINDS}
        found["rows"][rows] = {
            "seconds": took,
            "least_s": least,
            "ratio": took["int4"] / took["int8"],
            "allowed": least["int4"] / least["int8"],
            "of_bound": {kind: least[kind] / took[kind] for kind in KINDS},
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*SHAPES], default="qwen2.5-0.5b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 128])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    if given.threads is not None:
        torch.set_num_threads(given.threads)
    with torch.inference_mode():
        found = measured(given.model, given.rows, given.rounds)
    print(
        f"{'rows':>5} {'int8 ms':>9} {'int4 ms':>9} {'ratio':>6} {'allowed':>8} {'of bound: int8':>15} {'int4':>6}"
    )
    for rows, one in found["rows"].items():
        took, share = one["seconds"], one["of_bound"]
        print(
            f"{rows:>5} {took['int8'] * 1e3:>9.2f} {took['int4'] * 1e3:>9.2f} {one['ratio']:>6.2f} "
            f"{one['allowed']:>8.2f} {share['int8']:>15.2f} {share['int4']:>6.2f}"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
