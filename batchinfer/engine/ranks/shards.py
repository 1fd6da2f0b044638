"""Assigns shards of a model to the ranks of an engine. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.ranks.division import Division
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.stored_parts import check_parts
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.shard import ModelShard, Portion, Span
from batchinfer.models.parallel.shard_spec import expert_sizes, shard_spec, tensor_sizes
from batchinfer.models.spec.parameters import layer_parameters
from batchinfer.models.spec.spec import ModelSpec


def rank_shard(
    rank: int, division: Division, spec: ModelSpec, placement: ExpertPlacement | None = None
) -> ModelShard:
    """Return which part of a model a rank holds: layers, experts, and a share of the other weights.

    Tensor-parallel ranks get whole experts if the experts can be divided evenly.

    Args:
        rank: The number of the rank.
        division: How the model is sharded.
        spec: The specification of the whole model.
        placement: The experts that each rank holds. None: each rank holds consecutive experts.

    Raises:
        CannotSplit: There are more stages than layers, or the experts cannot be divided evenly.
    """
    share = Portion(division.peer(rank), division.peers)
    whole = share if share.size > 1 and share.size in expert_sizes(spec) else None
    place = ModelShard(share, whole) if division.experts == 1 else ModelShard(experts=share)
    place = replace(place, placement=placement if place.experts is not None else None)
    if division.experts > 1 and whole is None:
        sizes = ", ".join(map(str, expert_sizes(spec)))
        raise CannotSplit(
            f"the experts of {spec.family} cannot be divided evenly among {division.experts} ranks; "
            f"engine.expert_parallel_size can be {sizes or 1}"
        )
    if division.stages == 1:
        return place
    return replace(place, layers=stage_spans(spec, division.stages)[division.stage(rank)])


def expert_ranks(spec: ModelSpec, division: Division) -> int:
    """Return the number of ranks among which the experts of each layer are divided.

    Args:
        spec: The specification of the model.
        division: How the model is sharded.

    Returns:
        1 if each rank holds all experts.
    """
    share = rank_shard(0, division, spec).experts
    return 1 if share is None else share.size


def check_division(spec: ModelSpec, division: Division) -> None:
    """Raise an error if a model cannot be sharded in the given way.

    Args:
        spec: The specification of the model.
        division: How the model is sharded.

    Raises:
        CannotSplit: The model cannot be sharded in this way.
    """
    for rank in range(division.ranks):
        shard_spec(spec, rank_shard(rank, division, spec))


def check_stored(checkpoint: Checkpoint, division: Division) -> None:
    """Raise an error if ranks cannot read their shards from the tensors of a checkpoint.

    For example, a quantised tensor cannot be divided inside a group of values with a common scale.

    Args:
        checkpoint: The checkpoint.
        division: How the model is sharded.

    Raises:
        CannotSplit: The shards cannot be read. The message lists the possible numbers of ranks.
    """
    try:
        _check_stored(checkpoint, division)
    except CannotSplit as error:
        spec, by_experts = checkpoint.spec, division.experts > 1
        every = map(_of_experts, expert_sizes(spec)) if by_experts else map(Division, tensor_sizes(spec))
        sizes = ", ".join(str(one.peers) for one in every if _reads_in(checkpoint, one))
        option = "expert_parallel_size" if by_experts else "tensor_parallel_size"
        raise CannotSplit(
            f"{error}; engine.{option} can be {sizes}, and engine.pipeline_parallel_size "
            f"1 to {len(checkpoint.spec.layers)}"
        ) from None


def _check_stored(checkpoint: Checkpoint, division: Division) -> None:
    for rank in range(division.ranks):
        check_parts(checkpoint, rank_shard(rank, division, checkpoint.spec))


def _of_experts(ranks: int) -> Division:
    return Division(experts=ranks)


def _reads_in(checkpoint: Checkpoint, division: Division) -> bool:
    try:
        _check_stored(checkpoint, division)
    except CannotSplit:
        return False
    return True


def stage_spans(spec: ModelSpec, stages: int) -> list[Span]:
    """Divide the layers of a model among pipeline stages, so that the largest stage is as small as possible.

    The size of a stage is its number of weights. The last stage also has the output layer.

    Args:
        spec: The specification of the model.
        stages: The number of stages.

    Returns:
        (first, end) per stage: it has the layers from `first` up to, but not including, `end`.

    Raises:
        CannotSplit: There are more stages than layers.
    """
    if stages > len(spec.layers):
        raise CannotSplit(
            f"{len(spec.layers)} layers cannot be divided among {stages} stages; engine.pipeline_parallel_size can be "
            f"at most {len(spec.layers)}"
        )
    ends = _ends(
        [_values(spec, layer) for layer in range(len(spec.layers))], stages, spec.vocab * spec.hidden
    )
    return list(zip((0, *ends[:-1]), ends, strict=True))


def _values(spec: ModelSpec, layer: int) -> int:
    return sum(prod(shape) for shape in layer_parameters(spec.layers[layer]).values())


def _ends(layers: list[int], stages: int, head: int) -> list[int]:
    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        if left == 1:
            return sum(layers[first:]) + head, (len(layers),)
        found = (
            (max(sum(layers[first:end]), rest), (end, *ends))
            for end in range(first + 1, len(layers) - left + 2)
            for rest, ends in [best(end, left - 1)]
        )
        return min(found)

    return list(best(0, stages)[1])
