"""The ranks of an engine, and the seat of each among them. No torch: the parent decides about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided among the ranks of an engine, which are as many as the product of these."""

    tensor: int = 1  # ranks that compute each layer together
    stages: int = 1  # parts of the layers, one behind the other
    experts: int = 1  # ranks that divide the experts of each layer among them, and have all else of it each

    @property
    def ranks(self) -> int:
        """Count the ranks."""
        return self.peers * self.stages

    @property
    def peers(self) -> int:
        """Count the ranks with the same layers."""
        return self.tensor * self.experts

    def peer(self, rank: int) -> int:
        """Return which of the ranks with the same layers this one is."""
        return rank % self.peers

    def stage(self, rank: int) -> int:
        """Return which of the parts of the layers it has. Rank 0 has the last one, behind which tokens are sampled."""
        return (rank // self.peers - 1) % self.stages

    def neighbour(self, rank: int, step: int) -> int | None:
        """Return the rank that has the stage before (-1) or behind (1), and the same part of its layers; None: there is
        no such stage."""
        stage = self.stage(rank) + step
        if not 0 <= stage < self.stages:
            return None
        return (stage + 1) % self.stages * self.peers + self.peer(rank)


UNDIVIDED = Division()


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's seat says who it is, and where it meets the others."""

    rank: int
    division: Division
    # Path of a file, empty at first. Each rank writes into it the address at which it listens
    meeting: str
