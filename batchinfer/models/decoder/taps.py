"""Takes hidden states between the layers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Taps:
    """Takes what some layers read in one step: their numbers, ascending, where the number of all layers stands for what
    the last one gives, and (T, hidden) for each of them."""

    layers: tuple[int, ...]
    states: list[Tensor] = field(default_factory=list)

    def look(self, layer: int, x: Tensor, residual: Tensor | None) -> None:
        """Take what this layer reads, x + residual, if it is asked for."""
        if layer in self.layers:  # what a layer is given it may overwrite
            self.states.append(x.clone() if residual is None else x + residual)
