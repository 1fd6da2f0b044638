"""How a token's experts are chosen and weighted. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["max", "top_two"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which each token goes to `chosen` of `experts` experts.

    `scoring` makes scores of the router's logits: a softmax over all experts, a sigmoid of each, or a softmax over the
    chosen ones alone, which are those with the greatest logits. A score is the expert's weight; `normalised` divides
    the weights of a token by their sum, and `scale` multiplies them in the end.

    Where `corrected`, a learned correction of each expert is added to its score for the choice, not for its weight.
    Experts may stand in `groups` of equal size, of which a token uses the `chosen_groups` best: by their best score, or
    by the sum of their best two.
    """

    experts: int
    chosen: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    scale: float = 1.0
    corrected: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_score: GroupScore = "max"

    def __post_init__(self) -> None:
        """Raises ValueError for a rule that no token could follow."""
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"{self.chosen} of {self.experts} experts are chosen")
        if not 1 <= self.chosen_groups <= self.groups or self.experts % self.groups:
            raise ValueError(
                f"{self.chosen_groups} of {self.groups} groups of {self.experts} experts are chosen"
            )
        size = self.experts // self.groups
        if self.chosen > self.chosen_groups * size or (self.group_score == "top_two" and size < 2):
            raise ValueError(f"groups of {size} experts are too small, {self.chosen_groups} are chosen")
        if self.scoring == "softmax_of_chosen" and (self.corrected or self.groups > 1):
            raise ValueError("a softmax of the chosen experts knows neither corrections nor groups")
