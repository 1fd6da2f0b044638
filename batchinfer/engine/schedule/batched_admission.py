"""Batched admission: on a GPU, waits until several sequences can be admitted in one step.

A step with prompts costs the host more than a decode step. This module is free of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Admission starts at the latest when 1 / IDLE of the slots or of the cache blocks is free: step times are estimates
IDLE = 5


@dataclass(frozen=True, slots=True)
class AdmissionCosts:
    """Estimated times in seconds. The times of a device with unknown peaks are 0."""

    launch_s: float  # host: additional time to launch a step with prompts
    host_step_s: float  # host: per step
    host_row_s: float  # host: per row and step
    weights_s: float = 0.0  # device: to read the weights
    token_s: float = 0.0  # device: to compute a token
    kv_token_s: float = 0.0  # device: to read K and V of a token


class BatchedAdmission:
    """Decides when to admit the next batch of sequences after admission has stopped because there was no room.

    An empty slot wastes its share of the fixed time of each step. Admission wastes the time that the device waits while
    the host launches the prompts. Sequences are admitted when both are equal. If rows end evenly, this minimises the
    waste (economic order quantity, Harris, 1913). If prompts keep the device busy, they are admitted at once.
    """

    def __init__(self, costs: AdmissionCosts | None) -> None:
        """Create the state. If `costs` is None, a slot is filled as soon as it is free."""
        self._costs = costs
        self.prefill_tokens = 0  # prompt tokens in the newest step
        self.ended = 0  # sequences that have ended since admission stopped
        self.steps = 1  # decode steps in the newest launch
        self._slots = 0  # running sequences when admission stopped
        self._wasted_s = 0.0  # time wasted by empty slots since admission stopped
        self._counted = self._prompt_tokens = 0  # first waiting sequences, and the tokens that they would run

    def stop(self, running: int) -> None:
        """Record that no further sequence fits next to `running` sequences."""
        self._slots = running
        self.ended = self._counted = self._prompt_tokens = 0
        self._wasted_s = 0.0

    def should_wait(
        self, running: int, waiting: int, cached: int, budget: int, prompt_tokens: Callable[[int], int]
    ) -> bool:
        """Return True if no sequence should be admitted in this step.

        Args:
            running: The number of running sequences.
            waiting: The number of waiting sequences.
            cached: The tokens in the KV cache that the running sequences read.
            budget: The tokens that the step may still run.
            prompt_tokens: Returns the tokens that the first n waiting sequences would run.
        """
        costs = self._costs
        if costs is None or not running or self.ended >= min(self._slots // IDLE, waiting):
            return False
        self._wasted_s += self.steps * self.ended / self._slots * max(costs.weights_s, costs.host_step_s)
        if self._counted != self.ended:
            self._counted, self._prompt_tokens = self.ended, prompt_tokens(self.ended)
        if not self.ended or self._prompt_tokens >= budget:
            return not self.ended
        return self._wasted_s < self._idle_s(costs, running, cached)

    def _idle_s(self, costs: AdmissionCosts, running: int, cached: int) -> float:
        """Return the estimated time in seconds that the device would wait for the host if sequences were admitted now.

        Launching overlaps with the previous step, and with the work of the launched step.
        """
        host_s = costs.host_step_s + running * costs.host_row_s
        decode_s = max(costs.weights_s, running * costs.token_s) + cached * costs.kv_token_s
        before_s = (
            decode_s
            + self.prefill_tokens * costs.token_s
            - host_s
            - (costs.launch_s if self.prefill_tokens else 0.0)
        )
        own_s = decode_s + self._prompt_tokens * costs.token_s
        return host_s + costs.launch_s - own_s - max(0.0, before_s)
