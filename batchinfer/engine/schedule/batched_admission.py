"""Batched admission: decides when places that have come free are filled, where reading prompts costs a GPU's host more.

No torch: seconds and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# At the latest when one in this many places, or blocks of the cache, has come free: times of steps are estimates.
IDLE = 5


@dataclass(frozen=True, slots=True)
class AdmissionCosts:
    """Seconds that decide whether to wait. Those of a device whose peaks are not known are 0."""

    launch_s: float  # of the host: to launch a step that reads prompts, beyond what every step takes it
    host_step_s: float  # of the host: every step
    host_row_s: float  # of the host: a row of a step
    weights_s: float = 0.0  # of the device: to read the weights
    token_s: float = 0.0  # of the device: to compute a token
    kv_token_s: float = 0.0  # of the device: to read K and V of a token


class BatchedAdmission:
    """Decides, once admission has stopped for want of room, when the next batch of sequences is admitted.

    A place that stays empty wastes its share of what a step takes however many rows it has. Filling places wastes the
    time for which the device has nothing to do while the host launches their prompts: what launching takes beyond the
    work of this step, and beyond what the step before leaves of its own. Places are filled when waiting has wasted as
    much as filling them would: where rows end evenly that wastes least (the economic order quantity, Harris, 1913),
    and at once where prompts keep the device busy.
    """

    def __init__(self, costs: AdmissionCosts | None) -> None:
        """`costs` None: a place is filled as soon as there is one."""
        self._costs = costs
        self.read = 0  # tokens of prompts in the step that was scheduled last
        self.ended = 0  # sequences that have, since admission stopped
        self.steps = 1  # that were launched at once when this was last asked
        self._places = 0  # sequences that ran then
        self._wasted_s = 0.0  # since then
        self._counted = self._brought = 0  # of the sequences that wait, the tokens that would be run

    def stop(self, running: int) -> None:
        """Note that no sequence fits next to this many running ones."""
        self._places = running
        self.ended = self._counted = self._brought = 0
        self._wasted_s = 0.0

    def waits(
        self, running: int, waiting: int, cached: int, budget: int, brought: Callable[[int], int]
    ) -> bool:
        """Whether no place is filled in this step, in which these numbers of sequences run and wait.

        `cached`: tokens whose K and V they read; `budget`: tokens that the step may still run; `brought`: those that
        the first n that wait would run.
        """
        costs = self._costs
        if costs is None or not running or self.ended >= min(self._places // IDLE, waiting):
            return False
        self._wasted_s += self.steps * self.ended / self._places * max(costs.weights_s, costs.host_step_s)
        if self._counted != self.ended:
            self._counted, self._brought = self.ended, brought(self.ended)
        if not self.ended or self._brought >= budget:
            return not self.ended
        return self._wasted_s < self._idle_s(costs, running, cached)

    def _idle_s(self, costs: AdmissionCosts, running: int, cached: int) -> float:
        """Estimate for how long the device would have nothing to do if places were filled now. Launching overlaps with
        the work of the step that is launched, and with that of the step before."""
        host_s = costs.host_step_s + running * costs.host_row_s
        decode_s = max(costs.weights_s, running * costs.token_s) + cached * costs.kv_token_s
        before_s = decode_s + self.read * costs.token_s - host_s - (costs.launch_s if self.read else 0.0)
        own_s = decode_s + self._brought * costs.token_s
        return host_s + costs.launch_s - own_s - max(0.0, before_s)
