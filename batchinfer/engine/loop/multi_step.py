"""Multi-step decoding: the host of a GPU launches several decode steps before it reads their tokens.

This module is free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.core.samples import StepSample
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.budget import further_host_s
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds, step_total

MOST_STEPS = 4  # maximum steps per launch
# Launches after a multi-step launch in which no row may skip a step to have drafts. Such a row forces two single-step
# launches for all rows, so rows should do this at the same time
LAUNCHES_BETWEEN_DRAFTS = 8
LEAST_GAIN = 1.05  # minimum estimated gain in tokens per second for which several steps are launched


class MultiStepDecoding:
    """Chooses the number of decode steps per launch from the estimated times of device and host.

    Several steps per launch are faster if the host needs more time per step than the device. On the other hand, they
    compute useless tokens for each sequence that ends in the middle of a launch.

    Args:
        costs: The estimated times of host and device.
        most: The maximum number of steps per launch.
    """

    def __init__(self, costs: AdmissionCosts, most: int = MOST_STEPS) -> None:
        self._costs, self._most = costs, most
        self._tokens = self._ended = 0  # generated tokens and ended rows so far
        self._launches_without_drafts = 0  # remaining launches in which no row may be held

    def record_tokens(self, tokens: int, ended: int) -> None:
        """Update the mean output length, from which the share of tokens after the end of an answer is estimated.

        Args:
            tokens: The number of tokens that a launch generated.
            ended: The number of sequences that ended with the launch.
        """
        self._tokens += tokens
        self._ended += ended

    @property
    def can_hold_rows(self) -> bool:
        """True if sequences may skip a step to have drafts in a later step.

        It is False for the next 8 launches after a multi-step launch.
        """
        return self._launches_without_drafts == 0

    def record_launch(self, steps: int) -> None:
        """Record that `steps` decode steps were launched together."""
        if self._launches_without_drafts:
            self._launches_without_drafts -= 1
        elif steps > 1:
            self._launches_without_drafts = LAUNCHES_BETWEEN_DRAFTS

    def choose_steps(self, rows: int, cached: int) -> int:
        """Return the number of decode steps to launch together, from the estimated tokens per second.

        Args:
            rows: The number of decoding sequences.
            cached: The number of tokens in the KV cache that each step reads.

        Returns:
            The number of steps. It is 1 if several steps gain less than 5 %, or if the times of the device are
            unknown.
        """
        if not self._costs.weights_s:
            return 1
        speeds = [self.tokens_per_s(steps, rows, cached) for steps in range(1, self._most + 1)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return 1 + best if speeds[best] > LEAST_GAIN * speeds[0] else 1

    def tokens_per_s(self, steps: int, rows: int, cached: int) -> float:
        """Return the estimated tokens per second and sequence, without tokens after the end of an answer.

        Args:
            steps: The number of steps per launch.
            rows: The number of decoding sequences.
            cached: The number of tokens in the KV cache that each step reads.
        """
        return (
            steps * self._useful(steps) / max(steps * self.device_s(rows, cached), self.host_s(steps, rows))
        )

    def device_s(self, rows: int, cached: int) -> float:
        """Return the estimated device time of a decode step in seconds.

        Args:
            rows: The number of decoding sequences.
            cached: The number of tokens in the KV cache that the step reads.
        """
        costs = self._costs
        return max(costs.weights_s, rows * costs.token_s) + cached * costs.kv_token_s

    def host_s(self, steps: int, rows: int) -> float:
        """Return the estimated host time in seconds of a launch of `steps` decode steps with `rows` sequences."""
        return self._costs.host_step_s + rows * self._costs.host_row_s + further_host_s(steps - 1, rows)

    def _useful(self, steps: int) -> float:
        # On average, a sequence ends in the middle of a launch, when the next launch is already in flight
        length = self._tokens / max(1, self._ended)
        return max(0.0, 1 - 1.5 * (steps - 1) / length) if length else float(steps == 1)


def split_sample(
    sample: StepSample, shapes: Sequence[StepShape], computed: int, cost: ModelCost, peaks: Peaks | None
) -> list[StepSample]:
    """Split the measurements of a multi-step launch into one sample per decode step.

    The duration is divided equally. The work of the host counts for the first step.

    Args:
        sample: The measurements of the launch.
        shapes: The shape of the useful work of each step.
        computed: The number of positions that the launch computed, including positions after the end of an answer.
        cost: Computes the FLOPs and memory traffic of a step of the model.
        peaks: The peak FLOP/s and bandwidth of the device, or None if unknown.
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
