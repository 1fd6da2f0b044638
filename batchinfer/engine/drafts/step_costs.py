"""Estimates the duration of steps with and without drafts."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.samples import StepSample
from batchinfer.engine.drafts.draft_value import LEAST_GAIN, host_seconds
from batchinfer.engine.drafts.step_times import DraftedStepTimes

_NEWEST = 0.05  # the weight of the newest step in a moving average


class StepCosts:
    """Predicts the duration of the next step from measured steps, including time spent waiting for the host."""

    def __init__(self, times: DraftedStepTimes, looks_ahead: bool) -> None:
        """Create a predictor that has no measured steps yet.

        Args:
            times: Estimates the duration of steps on the device.
            looks_ahead: True if the host prepares a step while the previous step runs.
        """
        self._times, self._looks_ahead = times, looks_ahead
        # True if nothing was in flight when the newest step was planned: a row with drafts then misses no step
        self.together = not looks_ahead
        # Prompt tokens expected in the next step: as in the newest step, while sequences wait
        self.prompt_tokens = 0
        self._host_s = 0.0  # time that the device waits for the host if the next step has drafts
        self._launched = 1.0  # mean number of steps per launch, of steps without drafts

    def record_plan(self, decodes: int, ahead: int, others: int) -> None:
        """Record the shape of the next step, before its drafts are chosen.

        Args:
            decodes: The number of rows that decode in the step.
            ahead: The number of these rows whose newest tokens are still in flight.
            others: The number of prompt tokens of the step.
        """
        if decodes and self._looks_ahead:
            # If nothing is in flight, the following step may also wait for this step
            self.together = not ahead and not others
            self._host_s = host_seconds(decodes) if self.together else 0.0

    def can_pay_off(self, rows: int, others: int) -> bool:
        """Return True if drafts that are all accepted would increase the tokens per second of the next step.

        They would not if the step is bound by arithmetic instead of memory bandwidth.

        Args:
            rows: The number of rows that decode.
            others: The number of tokens of rows in prefill.
        """
        least = LEAST_GAIN * rows / self.seconds(rows, others, 0)
        tried = {max(1, rows // 4), rows, 2 * rows, 4 * rows}
        return any((rows + n) / self.seconds(rows, others, n) > least for n in tried)

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the estimated duration of the next step in seconds, including time spent waiting for the host.

        Args:
            decodes: The number of rows that decode.
            others: The number of tokens of rows in prefill.
            drafts: The total number of drafts that the step verifies.
        """
        took = self._times.seconds(decodes, others, drafts)
        if not self._looks_ahead:
            return took
        if drafts and self.together:
            return took + host_seconds(decodes)
        return max(took, host_seconds(decodes, 1.0 if drafts or others else self._launched))

    def device_seconds(self, rows: int, drafts: int) -> float:
        """Return the estimated device time in seconds of a step that verifies drafts.

        Args:
            rows: The number of rows, which all decode.
            drafts: The total number of drafts.
        """
        return self._times.seconds(rows, 0, drafts)

    def saved_s(self, sample: StepSample, accepted: int, spent_s: float) -> float | None:
        """Return the seconds that drafts saved in a step, negative if the step would have been faster without drafts.

        Without drafts, the accepted tokens would have taken further steps. The duration of these steps is estimated.

        Args:
            sample: The measurements of the step.
            accepted: The number of accepted drafts.
            spent_s: The part of the step's duration that a draft model took, in seconds.

        Returns:
            Seconds. None if the duration of steps without drafts is not known yet.
        """
        rows = max(1, sample.sampled_tokens - accepted)
        first_s = self._times.typical_seconds(rows, sample.prefill_tokens)
        further_s = self._times.typical_seconds(rows, 0)
        if first_s is None or further_s is None:
            return None
        # A step without drafts is assumed to take no longer than this step, which ran more tokens
        most_s = max(0.0, sample.duration_s - spent_s)
        without_s = min(first_s, most_s) + accepted / rows * min(further_s, most_s)
        return without_s - sample.duration_s

    def record_time(self, sample: StepSample, steps_s: float) -> None:
        """Learn from the duration of a step.

        Args:
            sample: The measurements of the step.
            steps_s: The duration of the step in seconds, without the time that a draft model took.
        """
        waited_s = self._host_s if sample.drafted_tokens else 0.0
        if not sample.drafted_tokens:
            self._launched += _NEWEST * (sample.launched_steps - self._launched)
        if steps_s != sample.duration_s or waited_s:
            sample = replace(sample, duration_s=max(steps_s / 2, steps_s - waited_s))
        self._times.record_time(sample)
        self.prompt_tokens = sample.prefill_tokens if sample.waiting else 0
