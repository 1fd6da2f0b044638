"""The rule that chooses and weights a token's experts. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["max", "top_two"]


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a mixture-of-experts layer chooses and weights the experts of each token.

    Attributes:
        experts: number of experts.
        chosen: number of experts per token.
        scoring: turns the router's logits into scores: a softmax over all experts, a sigmoid per expert, or a softmax
            over the experts with the greatest logits only. The score of a chosen expert is its weight.
        normalised: True if a token's weights are divided by their sum.
        scale: factor of the weights, applied last.
        corrected: True if a learned correction per expert is added to its score for the choice, not for its weight.
        groups: number of equal groups of experts.
        chosen_groups: number of groups, the best ones of a token, from which its experts are chosen.
        group_score: the score of a group: its best score ("max"), or the sum of its two best ("top_two").
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
        """Raise ValueError if the numbers of experts and groups contradict each other."""
        if not 1 <= self.chosen <= self.experts:
            raise ValueError(f"cannot choose {self.chosen} of {self.experts} experts")
        if not 1 <= self.chosen_groups <= self.groups or self.experts % self.groups:
            raise ValueError(
                f"cannot choose {self.chosen_groups} of {self.groups} groups of {self.experts} experts"
            )
        size = self.experts // self.groups
        if self.chosen > self.chosen_groups * size or (self.group_score == "top_two" and size < 2):
            raise ValueError(
                f"groups of {size} experts are too small to choose {self.chosen} from {self.chosen_groups}"
            )
        if self.scoring == "softmax_of_chosen" and (self.corrected or self.groups > 1):
            raise ValueError("scoring 'softmax_of_chosen' supports neither corrections nor groups")
