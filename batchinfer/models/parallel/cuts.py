"""Cuts of parameters: the outputs and inputs that a rank has, and reads of a checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.models.parallel.place import Portion, RankPlace, Span
from batchinfer.models.spec.parameters import BIAS, EMBEDDING, HEAD, Shape, layer_parameters
from batchinfer.models.spec.spec import LayerSpec, ModelSpec


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
