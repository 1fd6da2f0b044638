"""A simulated stage of a model that is divided among ranks: what each rank computes, and what they send each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from batchinfer.machine.links import DeviceLink
from batchinfer.models.parallel.sharded import RankTraffic
from batchinfer.plan.simulation.stage_schedule import StageWork
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, StepShape


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
