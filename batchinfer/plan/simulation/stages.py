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
    """The seconds that a pipeline stage needs for a step.

    Attributes:
        seconds: Seconds of computing and of communication within the stage.
        hand_on_s: Seconds of sending the result to the next stage.
    """

    seconds: float
    hand_on_s: float = 0.0


class StageSchedule:
    """Simulates the pipeline stages of an engine: schedules steps in order, and knows when each stage is free.

    A stage handles one step at a time. It keeps its output until the next stage is free to receive it.
    """

    def __init__(self, stages: int) -> None:
        """Create a schedule for `stages` pipeline stages, all idle."""
        self._free = [0.0] * stages
        self.busy = [0.0] * stages  # seconds of computing and sending, by stage

    @property
    def ended_s(self) -> float:
        """Return when the last scheduled step ends, in seconds since the start of the run."""
        return self._free[-1]

    @property
    def waited_s(self) -> float:
        """Return the mean idle seconds of a stage, from the start of the run to the end of the last scheduled step."""
        return self.ended_s - sum(self.busy) / len(self.busy)

    def run(
        self, work: Sequence[StageWork], submitted_s: float, launched_s: float, asked_s: float = 0.0
    ) -> float:
        """Schedule the next step, and return when it is done, in seconds since the start of the run.

        Args:
            work: The seconds that each stage needs for the step.
            submitted_s: When the first stage receives the step.
            launched_s: When the host has launched all layers. No stage is done earlier.
            asked_s: When the host waits for results. With several stages, the last one starts no earlier.
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
    """The messages that the ranks of a pipeline stage send, and the links that carry them.

    Attributes:
        traffic: Sizes and numbers of messages.
        ranks: Number of ranks of the stage.
        link: Link among these ranks.
        next_link: Link to the next stage. None for the last stage.
        all_logits: Whether ranks exchange the logits of the whole vocabulary. False: only the most likely tokens.
    """

    traffic: RankTraffic
    ranks: int
    link: DeviceLink
    next_link: DeviceLink | None = None
    all_logits: bool = False

    def sums_s(self, tokens: int, sampled: int) -> float:
        """Return the seconds that the ranks of the stage spend on collectives (all-reduce and all-gather) in a step.

        Args:
            tokens: Number of tokens of the step.
            sampled: Number of tokens that the step samples.
        """
        if self.ranks == 1:
            return 0.0
        traffic, states = self.traffic, self.traffic.token_bytes * tokens
        found = (traffic.sums + traffic.embedding) * self.link.all_reduce_s(states, self.ranks)
        of_row = traffic.logits if self.all_logits else traffic.best
        return found + (self.link.all_gather_s(of_row * sampled, self.ranks) if of_row and sampled else 0.0)

    def hand_on_s(self, tokens: int) -> float:
        """Return the seconds to send the hidden states of `tokens` tokens to the next stage. 0 for the last stage."""
        return 0.0 if self.next_link is None else self.next_link.send_s(self.traffic.token_bytes * tokens)


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """A pipeline stage, whose ranks have equal work.

    Attributes:
        cost: FLOPs and bytes of the shard of one rank.
        share: Share of the model's layers in this stage, 0 to 1.
        sends: Communication of the stage. None if its time is ignored.
    """

    cost: ModelCost
    share: float
    sends: StageSends | None = None

    def work(self, shape: StepShape, rows: int, time: StepTime) -> StageWork:
        """Return the seconds that this stage needs for a step of the whole model.

        Args:
            shape: Tokens and attention of the step, over all layers of the model.
            rows: Rows of the step.
            time: Predicts the seconds of a step.
        """
        pairs, read = round(shape.pairs * self.share), round(shape.kv_tokens * self.share)
        seconds = time.device_s(replace(shape, pairs=pairs, kv_tokens=read), self.cost, rows)
        if self.sends is None:
            return StageWork(seconds)
        sums_s = self.sends.sums_s(shape.tokens, shape.sampled)
        return StageWork(seconds + sums_s, self.sends.hand_on_s(shape.tokens))
