"""Costs of steps with drafts and without."""

from __future__ import annotations

from dataclasses import replace

from batchinfer.core.samples import StepSample
from batchinfer.engine.drafts.step_times import DraftedStepTimes
from batchinfer.engine.drafts.worth import LEAST_GAIN, host_seconds

_NEWEST = 0.05  # the weight of the newest step in a moving average


class StepCosts:
    """Predicts the duration of the next step, host included, and learns from each step that ran."""

    def __init__(self, times: DraftedStepTimes, looks_ahead: bool) -> None:
        """Start without any measured step.

        Args:
            times: Durations of steps on the device.
            looks_ahead: Whether the host prepares a step while the step before it runs.
        """
        self._times, self._looks_ahead = times, looks_ahead
        # True if a row with drafts misses no step: nothing was in flight when the newest step was planned
        self.together = not looks_ahead
        # Prompt tokens expected in the next step: as in the newest step, while sequences wait
        self.prompt_tokens = 0
        self._host_s = 0.0  # for which the device waits for the host if the next step has drafts
        self._launched = 1.0  # steps without drafts that the host launches at once, on average

    def planned(self, decodes: int, ahead: int, others: int) -> None:
        """Note that a step is planned.

        Args:
            decodes: Rows that decode in the step.
            ahead: How many of these rows are in flight.
            others: Prompt tokens of the step.
        """
        if decodes and self._looks_ahead:
            # if nothing is in flight, the following step may wait for this step, too
            self.together = not ahead and not others
            self._host_s = host_seconds(decodes) if self.together else 0.0

    def may_pay(self, rows: int, others: int) -> bool:
        """Return True if drafts would pay off if all were right. They do not in steps that arithmetic bounds."""
        least = LEAST_GAIN * rows / self.seconds(rows, others, 0)
        tried = {max(1, rows // 4), rows, 2 * rows, 4 * rows}
        return any((rows + n) / self.seconds(rows, others, n) > least for n in tried)

    def seconds(self, decodes: int, others: int, drafts: int) -> float:
        """Return the seconds of the next step with this number of drafts. The host prepares the step while the step
        before it runs, unless the drafts depend on the tokens of that step."""
        took = self._times.seconds(decodes, others, drafts)
        if not self._looks_ahead:
            return took
        if drafts and self.together:
            return took + host_seconds(decodes)
        return max(took, host_seconds(decodes, 1.0 if drafts or others else self._launched))

    def device_seconds(self, rows: int, drafts: int) -> float:
        """Return the seconds that the device takes for a step of decoding rows."""
        return self._times.seconds(rows, 0, drafts)

    def saved_s(self, sample: StepSample, accepted: int, spent_s: float) -> float | None:
        """Return the seconds that drafts saved: the time of a step's tokens without drafts, minus the step's own time.

        Without drafts, the accepted tokens would have taken further steps. None of these steps would have been longer
        than this step, which ran more tokens.

        Args:
            sample: The step.
            accepted: The drafts that were right.
            spent_s: The part of the step's time that a draft model took.

        Returns:
            None if the time of a step without drafts is not known yet.
        """
        rows = max(1, sample.sampled_tokens - accepted)
        first_s = self._times.typical_seconds(rows, sample.prefill_tokens)
        further_s = self._times.typical_seconds(rows, 0)
        if first_s is None or further_s is None:
            return None
        most_s = max(0.0, sample.duration_s - spent_s)
        without_s = min(first_s, most_s) + accepted / rows * min(further_s, most_s)
        return without_s - sample.duration_s

    def measured(self, sample: StepSample, steps_s: float) -> None:
        """Learn how long a step took.

        Args:
            sample: The step.
            steps_s: Its duration without the time that a draft model took.
        """
        waited_s = self._host_s if sample.drafted_tokens else 0.0
        if not sample.drafted_tokens:
            self._launched += _NEWEST * (sample.launched_steps - self._launched)
        if steps_s != sample.duration_s or waited_s:
            sample = replace(sample, duration_s=max(steps_s / 2, steps_s - waited_s))
        self._times.measured(sample)
        self.prompt_tokens = sample.prefill_tokens if sample.waiting else 0
