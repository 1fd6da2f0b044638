"""The part that a rank has of a model, and the ranks that have the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from batchinfer.models.parallel.alone import Alone
from batchinfer.models.parallel.group import Group
from batchinfer.models.parallel.place import EVERYTHING, RankPlace


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """The `place` of a rank in a model, and the ranks that add up what they make of a token: `tensor`, of their heads
    and columns; `experts`, of the ranges of experts that they have. `exact`: experts' results are added in the order
    and with the bits of one process, for which each of them is sent."""

    tensor: Group = field(default_factory=Alone)
    experts: Group = field(default_factory=Alone)
    exact: bool = False
    place: RankPlace = EVERYTHING


ALONE = Ranks()
