"""The place of a rank in a model, and the part of each parameter that it reads. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.models.parallel.expert_placement import ExpertPlacement
from batchinfer.models.spec.parameters import BIAS, EMBEDDING, HEAD, Shape, layer_parameters
from batchinfer.models.spec.spec import LayerSpec, ModelSpec

Span = tuple[int, int]  # from the first to before the second


@dataclass(frozen=True, slots=True)
class Portion:
    """One of `size` equal parts of something."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a part that there is not."""
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}")

    @property
    def whole(self) -> bool:
        """Whether it is all of it."""
        return self.size == 1

    def span(self, count: int) -> Span:
        """Return its part of `count` things, which differs from that of another rank by one thing at most."""
        return count * self.rank // self.size, count * (self.rank + 1) // self.size


ALL = Portion()


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The part of a model that a rank has.

    `tensor`: of the heads, the intermediate columns and the vocabulary. `experts`: of the experts, each as a whole,
    those that `placement` says, or a range of them; None: of each expert the `tensor` share of its columns. `layers`:
    those that the rank runs; None: all. The ranks of a model with the same `layers` are one group, whose members differ
    in `tensor` or `experts`.
    """

    tensor: Portion = ALL
    experts: Portion | None = None
    layers: Span | None = None
    placement: ExpertPlacement | None = None

    @property
    def whole(self) -> bool:
        """Whether it is all of the model."""
        return self.layers is None and not self.cuts

    @property
    def cuts(self) -> bool:
        """Whether the layers that it has are not all there."""
        return not self.tensor.whole or not (self.experts is None or self.experts.whole)


EVERYTHING = RankPlace()


@dataclass(frozen=True, slots=True)
class ParameterCut:
    """The outputs, or rows, and the inputs of a parameter that a rank has; None: all. `elsewhere`: another rank has its
    values, and here are zeros: a bias of results that are added up."""

    outputs: Span | None = None
    inputs: Span | None = None
    elsewhere: bool = False

    @property
    def whole(self) -> bool:
        """Whether it is read as a whole."""
        return self == WHOLE


WHOLE = ParameterCut()


def layer_cuts(whole: LayerSpec, own: LayerSpec, place: RankPlace) -> dict[str, ParameterCut]:
    """Return the cut of each parameter of a layer that the rank's part `own` of it has."""
    shapes, share = layer_parameters(whole), place.tensor
    added = {
        part + BIAS
        for all_of_it, linear in zip(whole.linears, own.linears, strict=True)
        for part, _ in linear.parts
        if linear.biased and linear.inputs != all_of_it.inputs
    }
    return {
        name: ParameterCut(elsewhere=share.rank > 0) if name in added else _cut(shapes[name], shape, share)
        for name, shape in layer_parameters(own).items()
    }


def table_cut(own: ModelSpec, name: str) -> ParameterCut:
    """Return the cut of a parameter before or after the layers that a rank's part of a model has."""
    return ParameterCut(own.tokens) if name in (EMBEDDING, HEAD) else WHOLE


def _cut(whole: Shape, own: Shape, share: Portion) -> ParameterCut:
    outputs, *inputs = (_span(count, held, share) for count, held in zip(whole, own, strict=True))
    return ParameterCut(outputs, inputs[0] if inputs else None)


def _span(count: int, held: int, share: Portion) -> Span | None:
    """Return the span of a rank that holds so many of all. Where there are fewer parts than ranks, neighbours have the
    same."""
    if count == held:
        return None
    first = count // held * share.rank // share.size * held
    return first, first + held
