"""Forecasts for a model sharded among the ranks of an engine: its stages and the memory of each."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace

from batchinfer.engine.kv.cache_layout import CacheLayout, stage_layout
from batchinfer.engine.ranks.division import Division
from batchinfer.engine.ranks.shards import rank_shard
from batchinfer.job import Job
from batchinfer.machine.devices import Devices
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.shard_spec import rank_traffic, shard_spec
from batchinfer.models.spec.model_cost import loaded_bytes, model_cost
from batchinfer.models.spec.parameters import parameter_count
from batchinfer.models.spec.spec import ModelSpec
from batchinfer.plan.setup.job_setup import Setup
from batchinfer.plan.setup.setting import Setting
from batchinfer.plan.simulation.simulator import block_bytes
from batchinfer.plan.simulation.stages import SimulatedStage, StageSends
from batchinfer_kernels.cost import Cost, ModelCost


@dataclass(frozen=True, slots=True)
class StagePart:
    """The part of a model on one rank of a stage. All ranks of a stage have parts of about equal size."""

    spec: ModelSpec
    cost: ModelCost
    weight_bytes: int
    layers: tuple[int, int]  # half-open range of layer numbers in the whole model

    def block_bytes(self, layout: CacheLayout, whole: ModelSpec) -> int:
        """Return the bytes of a KV-cache block on this rank. `layout` describes the whole model."""
        staged = self.layers != (0, len(whole.layers))
        own = stage_layout(layout, whole.caches, self.layers) if staged else layout
        return block_bytes(own, self.cost)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model sharded into stages, with one part per stage."""

    division: Division
    whole: ModelSpec
    parts: tuple[StagePart, ...]

    @property
    def weight_bytes(self) -> int:
        """Return the weight bytes of the largest part."""
        return max(part.weight_bytes for part in self.parts)

    def stages(self, devices: Devices, itemsize: int, all_logits: bool) -> tuple[SimulatedStage, ...]:
        """Return the stages for a simulation on these devices."""
        division, layers = self.division, sum(part.cost.layers for part in self.parts)
        among, between = devices.link_among(division.peers), devices.link_among(division.ranks)
        found = []
        for number, part in enumerate(self.parts, 1):
            behind = between if number < division.stages else None
            traffic = rank_traffic(part.spec, itemsize, division.experts > 1)
            sends = StageSends(traffic, division.peers, among, behind, all_logits)
            found.append(SimulatedStage(part.cost, part.cost.layers / layers, sends))
        return tuple(found)


def shard_model(setup: Setup, division: Division) -> ShardedModel | None:
    """Return the sharded model of a job, or None with one rank or third-party code. Raises CannotSplit."""
    checkpoint, setting = setup.checkpoint, setup.setting
    if division.ranks == 1 or not isinstance(checkpoint, Checkpoint):
        return None
    whole = checkpoint.spec.quantized(setting.numerics.quantization).with_cache_dtype(
        setting.numerics.kv_cache
    )
    return shard_into_stages(whole, division, setting)


def shard_into_stages(whole: ModelSpec, division: Division, setting: Setting) -> ShardedModel:
    """Return the parts of a sharded model. Raises CannotSplit."""
    firsts = sorted(range(0, division.ranks, division.peers), key=division.stage)
    return ShardedModel(division, whole, tuple(_part(whole, division, rank, setting) for rank in firsts))


def _part(whole: ModelSpec, division: Division, rank: int, setting: Setting) -> StagePart:
    experts = setting.parts.experts
    placement = None if experts is None else experts.placement
    place = rank_shard(_fullest(rank, division, placement), division, whole, placement)
    own = shard_spec(whole, place)
    cost = model_cost(own, setting.numerics.itemsize, setting.device, setting.numerics.deterministic)
    cost = cost if experts is None else with_imbalance(cost, experts.times)
    weights = loaded_bytes(own, parameter_count(own), setting.numerics.itemsize)
    return StagePart(own, cost, weights, place.layers or (0, len(whole.layers)))


def _fullest(first: int, division: Division, placement: ExpertPlacement | None) -> int:
    """Return the rank with the most experts in the stage whose first rank is `first`."""
    if placement is None:
        return first
    peers = range(division.peers)
    held = [sum(len(shares[peer]) for shares in placement.layers if shares) for peer in peers]
    return first + max(peers, key=held.__getitem__)


def with_imbalance(cost: ModelCost, times: float) -> ModelCost:
    """Return the cost of the most loaded rank, whose experts get `times` times the mean number of tokens."""
    operators = [
        replace(one, token=Cost(*(round(part * times) for part in astuple(one.token))))
        if one.experts
        else one
        for one in cost.operators
    ]
    return replace(cost, operators=tuple(operators))


def needs_all_logits(job: Job) -> bool:
    """Return True if ranks must gather the logits of all tokens. Greedy decoding needs only the best token."""
    params = job.params()
    asked = params.asks_logprobs or params.penalised or params.forbids_tokens or params.constraint is not None
    return asked or not params.greedy or bool(job.sampling.from_columns)


def measured_stages(cost: ModelCost, stages: int) -> tuple[SimulatedStage, ...]:
    """Return stages for a model whose step times were measured in earlier runs.

    A measured time runs from the end of one step to the end of the next. So each stage takes as long as a
    whole step.
    """
    return (SimulatedStage(cost, 1.0),) * stages
