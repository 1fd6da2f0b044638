"""Simulates pipeline stages of a sharded model: their work and their communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchinfer.machine.links import DeviceLink
from batchinfer.models.parallel.shard_spec import RankTraffic
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, StepShape


class StageWork(NamedTuple):
    """The seconds that a step takes in one stage: computing, and sending to the next stage."""

    seconds: float
    hand_on_s: float = 0.0


class StageSchedule:
    """Schedules steps through all stages in order.

    A stage handles one step at a time. It keeps its output until the next stage is free to receive it.
    """

    def __init__(self, stages: int) -> None:
        """Create a schedule for `stages` idle stages."""
        self._free = [0.0] * stages
        self.busy = [0.0] * stages  # seconds of computing and sending, by stage

    @property
    def ended_s(self) -> float:
        """Return the end of the last step."""
        return self._free[-1]

    @property
    def waited_s(self) -> float:
        """Return the mean idle seconds of a stage so far, including those before its first and after its last step."""
        return self.ended_s - sum(self.busy) / len(self.busy)

    def run(
        self, work: Sequence[StageWork], submitted_s: float, launched_s: float, asked_s: float = 0.0
    ) -> float:
        """Return when the next step is done.

        Args:
            work: Work of each stage.
            submitted_s: When the stages receive the step.
            launched_s: When the host has launched all layers. No stage is done earlier.
            asked_s: When the host waits for results. The last of several stages starts no earlier.
        """
        came, free, last = submitted_s, self._free, len(work) - 1
        for stage, (seconds, hand_on_s) in enumerate(work):
            done = max(max(came, free[stage]) + seconds, launched_s)
            self.busy[stage] += seconds
            if stage < last:
                taken = max(done, free[stage + 1], asked_s if stage + 1 == last else 0.0)
                done = taken + hand_on_s
                self.busy[stage] += hand_on_s
            came = free[stage] = done
        return came


@dataclass(frozen=True, slots=True)
class StageSends:
    """The messages of a stage's ranks, for the cost of communication.

    Attributes:
        traffic: Sizes and numbers of messages.
        ranks: Ranks of the stage.
        link: Link among these ranks.
        next_link: Link to the next stage. None for the last stage.
        all_logits: Whether rows need the logits of all tokens instead of the best one.
    """

    traffic: RankTraffic
    ranks: int
    link: DeviceLink
    next_link: DeviceLink | None = None
    all_logits: bool = False

    def sums_s(self, tokens: int, sampled: int) -> float:
        """Return the seconds of the collectives of a step."""
        if self.ranks == 1:
            return 0.0
        traffic, states = self.traffic, self.traffic.token_bytes * tokens
        found = (traffic.sums + traffic.embedding) * self.link.all_reduce_s(states, self.ranks)
        of_row = traffic.logits if self.all_logits else traffic.best
        return found + (self.link.all_gather_s(of_row * sampled, self.ranks) if of_row and sampled else 0.0)

    def hand_on_s(self, tokens: int) -> float:
        """Return the seconds of sending a step to the next stage."""
        return 0.0 if self.next_link is None else self.next_link.send_s(self.traffic.token_bytes * tokens)


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """A stage whose ranks have equal work.

    Attributes:
        cost: Cost of the part of one rank.
        share: Share of the model's layers in this stage.
        sends: Communication. None if it is not counted.
    """

    cost: ModelCost
    share: float
    sends: StageSends | None = None

    def work(self, shape: StepShape, rows: int, time: StepTime) -> StageWork:
        """Return the work of a step of the whole model in this stage."""
        pairs, read = round(shape.pairs * self.share), round(shape.kv_tokens * self.share)
        seconds = time.device_s(replace(shape, pairs=pairs, kv_tokens=read), self.cost, rows)
        if self.sends is None:
            return StageWork(seconds)
        sums_s = self.sends.sums_s(shape.tokens, shape.sampled)
        return StageWork(seconds + sums_s, self.sends.hand_on_s(shape.tokens))
