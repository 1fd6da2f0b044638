"""The ranks of an engine, and the seat of each among them. No torch: the parent decides about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided among the ranks of an engine, which are as many as the product of these."""

    tensor: int = 1  # ranks that compute each layer together
    stages: int = 1  # parts of the layers, one behind the other

    @property
    def ranks(self) -> int:
        """Count the ranks."""
        return self.tensor * self.stages

    def __str__(self) -> str:
        parts = [f"tensor_parallel_size {self.tensor}"] * (self.tensor > 1)
        parts += [f"pipeline_parallel_size {self.stages}"] * (self.stages > 1)
        return " × ".join(parts) or "one rank"


UNDIVIDED = Division()


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's seat says who it is, and where it meets the others."""

    rank: int
    division: Division
    meeting: str  # the path of a file, empty at first, in which each writes where the others reach it
