"""The shard of a model that a rank holds, and the part of each parameter that it reads. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.spec.parameters import BIAS, EMBEDDING, HEAD, Shape, layer_parameters
from batchinfer.models.spec.spec import LayerSpec, ModelSpec

Span = tuple[int, int]  # first, end (exclusive)


@dataclass(frozen=True, slots=True)
class Portion:
    """A rank's part of items that are divided evenly among ranks, such as heads, columns, tokens or experts.

    Args:
        rank: The number of the part, from 0.
        size: The number of parts.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    @property
    def is_whole(self) -> bool:
        """Return True if the items are not divided: this part has all of them."""
        return self.size == 1

    def span(self, count: int) -> Span:
        """Return the range (first, end) of the items that the rank has. Sizes of ranges differ by at most one.

        Args:
            count: The number of all items.
        """
        return count * self.rank // self.size, count * (self.rank + 1) // self.size


ALL = Portion()


@dataclass(frozen=True, slots=True)
class ModelShard:
    """The part of a model that a rank holds.

    Args:
        tensor: The rank's portion of the heads, the intermediate columns and the vocabulary.
        experts: The rank's portion of the experts, which are not split. None: the rank has a part of the columns of
            every expert, as of dense feed-forward halves.
        layers: The layers that the rank computes, (first, end). None: all.
        placement: The experts that each rank holds. None: each rank holds a contiguous range of experts.
    """

    tensor: Portion = ALL
    experts: Portion | None = None
    layers: Span | None = None
    placement: ExpertPlacement | None = None

    @property
    def is_whole(self) -> bool:
        """Return True if the shard is the whole model."""
        return self.layers is None and not self.splits_layers

    @property
    def splits_layers(self) -> bool:
        """Return True if the rank holds only a part of each of its layers: some heads, columns or experts."""
        return not self.tensor.is_whole or not (self.experts is None or self.experts.is_whole)


WHOLE_MODEL = ModelShard()


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """The part of a parameter that a rank reads.

    Args:
        outputs: The range of outputs (rows of a table), (first, end). None: all.
        inputs: The range of inputs, (first, end). None: all.
        elsewhere: If True, another rank reads the values, and this rank uses zeros. An example is the bias of a product
            whose outputs are summed over ranks.
    """

    outputs: Span | None = None
    inputs: Span | None = None
    elsewhere: bool = False

    @property
    def is_whole(self) -> bool:
        """Return True if the rank reads the complete parameter."""
        return self == WHOLE_PARAMETER


WHOLE_PARAMETER = ParameterShard()


def shard_layer(whole: LayerSpec, own: LayerSpec, shard: ModelShard) -> dict[str, ParameterShard]:
    """Return the part of each parameter of a layer that a rank reads, by name of the parameter.

    Args:
        whole: The layer, as in the whole model.
        own: The layer, as in the spec of the rank's shard.
        shard: The rank's shard.
    """
    shapes, share = layer_parameters(whole), shard.tensor
    added = {
        part + BIAS
        for all_of_it, linear in zip(whole.linears, own.linears, strict=True)
        for part, _ in linear.parts
        if linear.biased and linear.inputs != all_of_it.inputs
    }
    return {
        name: ParameterShard(elsewhere=share.rank > 0)
        if name in added
        else _shard(shapes[name], shape, share)
        for name, shape in layer_parameters(own).items()
    }


def shard_table(own: ModelSpec, name: str) -> ParameterShard:
    """Return the part that a rank reads of a parameter outside of layers.

    It is a range of rows of the embedding or the output layer, and all of other parameters.

    Args:
        own: The spec of the rank's shard.
        name: The name of the parameter, such as "embedding".
    """
    return ParameterShard(own.tokens) if name in (EMBEDDING, HEAD) else WHOLE_PARAMETER


def _shard(whole: Shape, own: Shape, share: Portion) -> ParameterShard:
    outputs, *inputs = (_span(count, held, share) for count, held in zip(whole, own, strict=True))
    return ParameterShard(outputs, inputs[0] if inputs else None)


def _span(count: int, held: int, share: Portion) -> Span | None:
    # If there are fewer parts than ranks, neighbouring ranks hold the same part, such as a KV head
    if count == held:
        return None
    first = count // held * share.rank // share.size * held
    return first, first + held
