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
    """Estimated times of host and device, in seconds, from which the delay of admission is computed.

    All device times are 0 if the peaks of the device are unknown.

    Attributes:
        launch_s: Additional host time to launch a step with prompts.
        host_step_s: Host time per step.
        host_row_s: Host time per row and step.
        weights_s: Device time to read the weights.
        token_s: Device time to compute a token.
        kv_token_s: Device time to read the keys and values of a token.
    """

    launch_s: float
    host_step_s: float
    host_row_s: float
    weights_s: float = 0.0
    token_s: float = 0.0
    kv_token_s: float = 0.0


class BatchedAdmission:
    """Decides when to admit waiting sequences, after admission has stopped because there was no room.

    To wait wastes the time of empty batch slots. To admit wastes the time that the device waits while the host
    launches the prompts. Sequences are admitted when the two wasted times are equal.
    """

    def __init__(self, costs: AdmissionCosts | None) -> None:
        """Create the state of an engine that runs no sequences yet.

        Args:
            costs: The estimated times of host and device. None: admission is never delayed.
        """
        self._costs = costs
        self.prefill_tokens = 0  # prompt tokens in the newest step
        self.ended = 0  # sequences that have ended since admission stopped
        self.steps = 1  # decode steps in the newest launch
        self._slots = 0  # running sequences when admission stopped
        self._wasted_s = 0.0  # time wasted by empty slots since admission stopped
        self._counted = self._prompt_tokens = 0  # first waiting sequences, and the tokens that they would run

    def stop(self, running: int) -> None:
        """Record that admission has stopped, because no further sequence fits.

        Args:
            running: The number of running sequences.
        """
        self._slots = running
        self.ended = self._counted = self._prompt_tokens = 0
        self._wasted_s = 0.0

    def should_wait(
        self, running: int, waiting: int, cached: int, budget: int, prompt_tokens: Callable[[int], int]
    ) -> bool:
        """Return True if no sequence should be admitted in the next step. Call it once per step.

        Args:
            running: The number of running sequences.
            waiting: The number of waiting sequences.
            cached: The number of tokens in the KV cache that the running sequences read.
            budget: The number of tokens by which the step can still be extended.
            prompt_tokens: Returns the number of tokens that the first n waiting sequences would run.
        """
        costs = self._costs
        if costs is None or not running or self.ended >= min(self._slots // IDLE, waiting):
            return False
        self._wasted_s += self.steps * self.ended / self._slots * max(costs.weights_s, costs.host_step_s)
        if self._counted != self.ended:
            self._counted, self._prompt_tokens = self.ended, prompt_tokens(self.ended)
        if not self.ended or self._prompt_tokens >= budget:
            return not self.ended
        # If sequences end evenly, this minimises the total waste (economic order quantity, Harris, 1913)
        return self._wasted_s < self._idle_s(costs, running, cached)

    def _idle_s(self, costs: AdmissionCosts, running: int, cached: int) -> float:
        # The host launches a step while the device runs the previous step and the beginning of the launched step
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
