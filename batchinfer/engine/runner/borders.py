"""The borders of the layers that a runner has: the first and the last ones of a model, or those of ranks before and
behind it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Borders(Protocol):
    """The borders say what comes before a runner's layers, and what becomes of their results. Neither is a part of a
    captured step."""

    @property
    def begins(self) -> bool:
        """Whether the layers read token ids, and not what an earlier stage has made of them."""

    @property
    def ends(self) -> bool:
        """Whether tokens are sampled behind the layers, and no later stage goes on with their results."""

    def receive(self, tokens: int) -> None:
        """Have the hidden states of so many tokens, which the stage before sends, where the layers read them."""

    def hand_on(self, hidden: Tensor) -> None:
        """Send the hidden states of a step's tokens, (T, hidden), to the stage behind."""


class WholeModel:
    """The borders of a runner that has all layers."""

    begins = ends = True

    def receive(self, tokens: int) -> None:
        """Do nothing: there is no stage before."""

    def hand_on(self, hidden: Tensor) -> None:
        """Do nothing: there is no stage behind."""
