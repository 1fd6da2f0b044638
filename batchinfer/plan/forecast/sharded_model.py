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
    """The shard of a model on one rank of a pipeline stage. All ranks of a stage have shards of about equal size.

    Attributes:
        spec: The layers and weights of the shard.
        cost: FLOPs and bytes of the shard's part of a step.
        weight_bytes: Bytes of the shard's weights.
        layers: (first, end): the shard has the layers of the whole model with indices from `first` to `end` - 1.
    """

    spec: ModelSpec
    cost: ModelCost
    weight_bytes: int
    layers: tuple[int, int]

    def block_bytes(self, layout: CacheLayout, whole: ModelSpec) -> int:
        """Return the bytes of one KV-cache block on this rank: the keys and values of the rank's layers.

        Args:
            layout: Layout of the KV cache of the whole model.
            whole: The whole model.
        """
        staged = self.layers != (0, len(whole.layers))
        own = stage_layout(layout, whole.caches, self.layers) if staged else layout
        return block_bytes(own, self.cost)


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """A model sharded into pipeline stages.

    Attributes:
        division: The numbers of tensor-parallel, pipeline-parallel and expert-parallel ranks.
        whole: The whole model.
        parts: For each stage, the shard of one rank.
    """

    division: Division
    whole: ModelSpec
    parts: tuple[StagePart, ...]

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights on the rank that has the largest shard."""
        return max(part.weight_bytes for part in self.parts)

    def stages(self, devices: Devices, itemsize: int, all_logits: bool) -> tuple[SimulatedStage, ...]:
        """Return a simulated pipeline stage for each stage of the model: its cost and the data that its ranks exchange.

        Args:
            devices: The devices of the ranks, and the links between them.
            itemsize: Bytes of a value of hidden states.
            all_logits: Whether ranks exchange the logits of the whole vocabulary. False: only the most likely tokens.
        """
        division, layers = self.division, sum(part.cost.layers for part in self.parts)
        among, between = devices.link_among(division.peers), devices.link_among(division.ranks)
        found = []
        for number, part in enumerate(self.parts, 1):
            next_link = between if number < division.stages else None
            traffic = rank_traffic(part.spec, itemsize, division.experts > 1)
            sends = StageSends(traffic, division.peers, among, next_link, all_logits)
            found.append(SimulatedStage(part.cost, part.cost.layers / layers, sends))
        return tuple(found)


def shard_model(setup: Setup, division: Division) -> ShardedModel | None:
    """Return the shards of a job's model by pipeline stage.

    Returns None with a single rank, or for a model that third-party code runs.

    Args:
        setup: The job's model, tokenizer and setting.
        division: The numbers of tensor-parallel, pipeline-parallel and expert-parallel ranks.

    Raises:
        CannotSplit: The model cannot be sharded.
    """
    checkpoint, setting = setup.checkpoint, setup.setting
    if division.ranks == 1 or not isinstance(checkpoint, Checkpoint):
        return None
    whole = checkpoint.spec.quantized(setting.numerics.quantization).with_cache_dtype(
        setting.numerics.kv_cache
    )
    return shard_into_stages(whole, division, setting)


def shard_into_stages(whole: ModelSpec, division: Division, setting: Setting) -> ShardedModel:
    """Return the shards of a model by pipeline stage.

    Args:
        whole: The whole model.
        division: The numbers of tensor-parallel, pipeline-parallel and expert-parallel ranks.
        setting: The job's device, arithmetic, memory and parallelism.

    Raises:
        CannotSplit: The model cannot be sharded.
    """
    firsts = sorted(range(0, division.ranks, division.peers), key=division.stage)
    return ShardedModel(division, whole, tuple(_part(whole, division, rank, setting) for rank in firsts))


def _part(whole: ModelSpec, division: Division, rank: int, setting: Setting) -> StagePart:
    experts = setting.parts.experts
    placement = None if experts is None else experts.placement
    place = rank_shard(_fullest(rank, division, placement), division, whole, placement)
    own = shard_spec(whole, place)
    cost = model_cost(own, setting.numerics.itemsize, setting.device, setting.numerics.deterministic)
    cost = cost if experts is None else with_imbalance(cost, experts.load_factor)
    weights = loaded_bytes(own, parameter_count(own), setting.numerics.itemsize)
    return StagePart(own, cost, weights, place.layers or (0, len(whole.layers)))


def _fullest(first: int, division: Division, placement: ExpertPlacement | None) -> int:
    if placement is None:
        return first
    peers = range(division.peers)
    held = [sum(len(shares[peer]) for shares in placement.layers if shares) for peer in peers]
    return first + max(peers, key=held.__getitem__)


def with_imbalance(cost: ModelCost, factor: float) -> ModelCost:
    """Return the cost of a model's steps on the rank whose experts receive the largest number of tokens.

    Args:
        cost: The cost if every rank's experts receive the same number of tokens.
        factor: Tokens of the most loaded rank divided by the mean over ranks.
    """
    operators = [
        replace(one, token=Cost(*(round(part * factor) for part in astuple(one.token))))
        if one.experts
        else one
        for one in cost.operators
    ]
    return replace(cost, operators=tuple(operators))


def needs_all_logits(job: Job) -> bool:
    """Return True if the ranks of an engine must exchange the logits of the whole vocabulary for sampling.

    For greedy decoding, each rank only sends the most likely token of its part of the vocabulary.
    """
    params = job.params()
    asked = (
        params.asks_logprobs or params.has_penalty or params.forbids_tokens or params.constraint is not None
    )
    return asked or not params.greedy or bool(job.sampling.from_columns)


def measured_stages(cost: ModelCost, stages: int) -> tuple[SimulatedStage, ...]:
    """Return simulated pipeline stages for step times that were measured in earlier runs with as many stages.

    Each stage gets the cost of the whole model, because such a step time is already the time of a single stage: it was
    measured from the end of one step to the end of the next.

    Args:
        cost: FLOPs and bytes of the whole model's steps.
        stages: Number of stages.
    """
    return (SimulatedStage(cost, 1.0),) * stages
