"""A simulated stage of a model that is divided among ranks: what each rank computes, and what they send each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from batchinfer.machine.links import DeviceLink
from batchinfer.models.parallel.sharded import RankTraffic
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, StepShape


class StageWork(NamedTuple):
    """The time that a step takes one stage: seconds of its own, and of handing on to the stage behind it."""

    seconds: float
    hand_on_s: float = 0.0


class StageSchedule:
    """Steps go through all stages, in the order in which they come. A stage has one of them at a time: it keeps what it
    has made until the stage behind it is free to take it, as ranks do that send each other hidden states."""

    def __init__(self, stages: int) -> None:
        """`stages`: how many there are."""
        self._free = [0.0] * stages
        self.busy = [0.0] * stages  # seconds that each computes, and hands on

    @property
    def ended_s(self) -> float:
        """Return when the last step that has run is done."""
        return self._free[-1]

    @property
    def waited_s(self) -> float:
        """Return the seconds that a stage has waited so far, as a mean of all: for the first step, for others, and for
        the last one."""
        return self.ended_s - sum(self.busy) / len(self.busy)

    def run(self, work: Sequence[StageWork], told_s: float, launched_s: float, asked_s: float = 0.0) -> float:
        """Return when the next step is done. It may begin once stages are told of it, and no stage is done before it is
        launched; the last of several takes it once its results are asked for."""
        came, free, last = told_s, self._free, len(work) - 1
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
    """The messages that the ranks of a stage send: each other, over `link`, and the stage behind them, over
    `next_link`; None: there is none. `all_logits`: rows need the logits of all tokens, and not only the best one."""

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
        """Return the seconds of handing a step on."""
        return 0.0 if self.next_link is None else self.next_link.send_s(self.traffic.token_bytes * tokens)


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """A stage, all of whose ranks have about as much to do. `cost`: of the part of one rank, of whose layers the
    `share` has attention of all layers with it; `sends` is None where nothing that is sent is counted."""

    cost: ModelCost
    share: float
    sends: StageSends | None = None

    def work(self, shape: StepShape, rows: int, time: StepTime) -> StageWork:
        """Return what a step of the whole model takes this stage."""
        pairs, read = round(shape.pairs * self.share), round(shape.kv_tokens * self.share)
        seconds = time.device_s(replace(shape, pairs=pairs, kv_tokens=read), self.cost, rows)
        if self.sends is None:
            return StageWork(seconds)
        sums_s = self.sends.sums_s(shape.tokens, shape.sampled)
        return StageWork(seconds + sums_s, self.sends.hand_on_s(shape.tokens))
