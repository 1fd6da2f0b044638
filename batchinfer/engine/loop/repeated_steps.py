"""Several steps of rows that only decode, launched at once by a GPU's host (multi-step decoding).

No torch: seconds and counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from batchinfer.core.samples import StepSample
from batchinfer.engine.schedule.batched_admission import AdmissionCosts
from batchinfer.engine.schedule.budget import further_host_s
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape, roofline_seconds, step_total

MOST_STEPS = 4
# Launches behind one of several steps in which no row waits for its tokens so as to have drafts. A row that waits has
# all others run one step at a time for two launches, so that those that want to should do so together
APART_FROM_DRAFTS = 8
# Several steps have to give so many times as many tokens a second by estimates
LEAST_GAIN = 1.05


class RepeatedSteps:
    """Chooses the number of steps by what the device and the host take for them, as a step gives each row a token.

    While the host takes longer for a step than the device, the device waits; and most of what the host does it does
    once for all steps that it launches together. But a row that ends in the middle runs on to the last of them, and
    through all that were launched behind them by the time that the host knows; its place stays empty for as long.
    """

    def __init__(self, costs: AdmissionCosts, most: int = MOST_STEPS) -> None:
        self._costs, self._most = costs, most
        self._tokens = self._ended = 0  # that rows have got in steps, and rows that have ended
        self._apart = 0  # launches to come in which no row may wait

    def note(self, tokens: int, ended: int) -> None:
        """Take into account how many tokens steps have given, and how many rows have ended with them."""
        self._tokens += tokens
        self._ended += ended

    @property
    def may_wait(self) -> bool:
        """Whether rows may wait for the tokens of the next launch so as to have drafts."""
        return self._apart == 0

    def launched(self, steps: int) -> None:
        """Count a launch."""
        if self._apart:
            self._apart -= 1
        elif steps > 1:
            self._apart = APART_FROM_DRAFTS

    def most(self, rows: int, cached: int) -> int:
        """Return the number of steps for so many rows, which read K and V of `cached` tokens in each. 1 where nobody
        knows what the device takes."""
        if not self._costs.weights_s:
            return 1
        speeds = [self.tokens_per_s(steps, rows, cached) for steps in range(1, self._most + 1)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        return 1 + best if speeds[best] > LEAST_GAIN * speeds[0] else 1

    def tokens_per_s(self, steps: int, rows: int, cached: int) -> float:
        """Estimate the tokens a second that are of use, of each row."""
        return (
            steps * self._useful(steps) / max(steps * self.device_s(rows, cached), self.host_s(steps, rows))
        )

    def device_s(self, rows: int, cached: int) -> float:
        """Estimate the seconds that a step takes the device."""
        costs = self._costs
        return max(costs.weights_s, rows * costs.token_s) + cached * costs.kv_token_s

    def host_s(self, steps: int, rows: int) -> float:
        """Estimate the seconds that the host takes for so many steps that are launched at once."""
        return self._costs.host_step_s + rows * self._costs.host_row_s + further_host_s(steps - 1, rows)

    def _useful(self, steps: int) -> float:
        """Estimate the part of tokens that belongs to answers: a row ends in the middle of a launch, when another one
        is under way already. Answers that end evenly are as long as there are tokens for each end."""
        length = self._tokens / max(1, self._ended)
        return max(0.0, 1 - 1.5 * (steps - 1) / length) if length else float(steps == 1)


def divided_samples(
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
