"""The part of a model that each rank of an engine has. No torch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

from batchinfer.core.errors import CannotSplit
from batchinfer.engine.ranks.seat import Division
from batchinfer.models.checkpoint.checkpoint import Checkpoint
from batchinfer.models.checkpoint.stored_parts import check_parts
from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.parallel.shard import ModelShard, Portion, Span
from batchinfer.models.parallel.shard_spec import expert_sizes, shard_spec, tensor_sizes
from batchinfer.models.spec.parameters import layer_parameters
from batchinfer.models.spec.spec import ModelSpec


def place_of(
    rank: int, division: Division, spec: ModelSpec, placement: ExpertPlacement | None = None
) -> ModelShard:
    """Return the place of a rank in a model. Tensor ranks have whole experts, where each has as many as the others.
    `placement`: of whole experts; None: they are in ranges.
    Raises CannotSplit for more stages than it has layers, and where ranks of experts would not have as many each."""
    share = Portion(division.peer(rank), division.peers)
    whole = share if share.size > 1 and share.size in expert_sizes(spec) else None
    place = ModelShard(share, whole) if division.experts == 1 else ModelShard(experts=share)
    place = replace(place, placement=placement if place.experts is not None else None)
    if division.experts > 1 and whole is None:
        sizes = ", ".join(map(str, expert_sizes(spec)))
        raise CannotSplit(
            f"the experts of {spec.family} cannot be divided among {division.experts} ranks, as many to each; "
            f"engine.expert_parallel_size can be {sizes or 1}"
        )
    if division.stages == 1:
        return place
    return replace(place, layers=stage_spans(spec, division.stages)[division.stage(rank)])


def expert_ranks(spec: ModelSpec, division: Division) -> int:
    """Count the ranks that whole experts of each layer are divided among; 1: none are."""
    share = place_of(0, division, spec).experts
    return 1 if share is None else share.size


def check_division(spec: ModelSpec, division: Division) -> None:
    """Raise CannotSplit where the model cannot be divided so."""
    for rank in range(division.ranks):
        shard_spec(spec, place_of(rank, division, spec))


def check_stored(checkpoint: Checkpoint, division: Division) -> None:
    """Raise CannotSplit where the tensors of a checkpoint cannot be read in such parts, with the numbers of ranks that
    can have parts of them. Only headers are read."""
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
        check_parts(checkpoint, place_of(rank, division, checkpoint.spec))


def _of_experts(ranks: int) -> Division:
    return Division(experts=ranks)


def _reads_in(checkpoint: Checkpoint, division: Division) -> bool:
    """Whether a checkpoint can be read by these ranks."""
    try:
        _check_stored(checkpoint, division)
    except CannotSplit:
        return False
    return True


def stage_spans(spec: ModelSpec, stages: int) -> list[Span]:
    """Divide the layers so that the stage with the most weights has as few as can be; the last one has the head beside
    its layers. Raises CannotSplit."""
    if stages > len(spec.layers):
        raise CannotSplit(
            f"{len(spec.layers)} layers cannot be divided among {stages} stages; engine.pipeline_parallel_size is "
            f"{len(spec.layers)} at the most"
        )
    ends = _ends(
        [_values(spec, layer) for layer in range(len(spec.layers))], stages, spec.vocab * spec.hidden
    )
    return list(zip((0, *ends[:-1]), ends, strict=True))


def _values(spec: ModelSpec, layer: int) -> int:
    return sum(prod(shape) for shape in layer_parameters(spec.layers[layer]).values())


def _ends(layers: list[int], stages: int, head: int) -> list[int]:
    """Return where each stage ends, of as many layers as there are values."""

    @cache
    def best(first: int, left: int) -> tuple[int, tuple[int, ...]]:
        """The weights of the largest of the last `left` stages, which begin with layer `first`; and where they end."""
        if left == 1:
            return sum(layers[first:]) + head, (len(layers),)
        found = (
            (max(sum(layers[first:end]), rest), (end, *ends))
            for end in range(first + 1, len(layers) - left + 2)
            for rest, ends in [best(end, left - 1)]
        )
        return min(found)

    return list(best(0, stages)[1])
