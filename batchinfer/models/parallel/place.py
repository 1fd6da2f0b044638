"""The place of a rank among those that compute a model together. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from batchinfer.models.parallel.expert_placement import ExpertPlacement

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
