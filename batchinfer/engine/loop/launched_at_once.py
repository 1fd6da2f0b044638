"""The samples of steps that were launched at once: what the host measures of all of them is divided among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.core.samples import StepSample
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds, step_total


def apart(
    sample: StepSample, shapes: Sequence[StepShape], computed: int, cost: ModelCost, peaks: Peaks | None
) -> list[StepSample]:
    """Return a sample of each of the steps, which only decode, of the `sample` of all, which has the time of all.

    shapes: of what is useful in each; computed: query positions in all, those included that are computed for nothing.
    Whatever the host did for all of them counts as the first one's.
    """
    count, found = len(shapes), list[StepSample]()
    each_s, rows = sample.duration_s / count, computed // count
    for number, shape in enumerate(shapes):
        costs = cost.step(shape)
        kept = sample if number == 0 else _without_host(sample)
        found.append(
            replace(
                kept,
                step=sample.step + number,
                started_s=sample.started_s + number * each_s,
                duration_s=each_s,
                model_s=sample.model_s / count,
                prefill_tokens=0,
                decode_tokens=shape.tokens,
                sampled_tokens=shape.sampled,
                padded_tokens=rows + (computed % count if number == 0 else 0) - shape.tokens,
                flops=cost.model_flops(shape),
                bytes=step_total(costs).bytes,
                roofline_s=None if peaks is None else roofline_seconds(costs, peaks),
                pairs=shape.pairs,
                kv_tokens=shape.kv_tokens,
                launched_steps=count,
            )
        )
    return found


def _without_host(sample: StepSample) -> StepSample:
    """Return a sample without what counts once for all steps that were launched at once."""
    capture_s = None if sample.capture_s is None else 0.0
    graph_bytes = None if sample.graph_bytes is None else 0
    return replace(
        sample,
        cached_tokens=0,
        preemptions=0,
        forced_tokens=0,
        mask_s=0.0,
        compile_s=0.0,
        metering_s=0.0,
        capture_s=capture_s,
        graph_bytes=graph_bytes,
    )
