"""How a model is divided among ranks. Imports no torch, because the driver uses this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided among the ranks of an engine: the number of ranks is the product of the fields."""

    tensor: int = 1  # tensor-parallel ranks
    stages: int = 1  # pipeline stages
    # expert-parallel ranks: each has a share of the experts and all other weights of its layers
    experts: int = 1

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.peers * self.stages

    @property
    def peers(self) -> int:
        """Return the number of ranks with the same layers."""
        return self.tensor * self.experts

    def peer(self, rank: int) -> int:
        """Return the number of a rank among the ranks with the same layers."""
        return rank % self.peers

    def stage(self, rank: int) -> int:
        """Return the pipeline stage of a rank. Rank 0 has the last stage, as it samples."""
        return (rank // self.peers - 1) % self.stages

    def neighbour(self, rank: int, step: int) -> int | None:
        """Return the rank with the same shard of the neighbouring stage, or None if there is no such stage.

        Args:
            rank: The rank whose neighbour is returned.
            step: -1: the previous stage; 1: the next stage.
        """
        stage = self.stage(rank) + step
        if not 0 <= stage < self.stages:
            return None
        return (stage + 1) % self.stages * self.peers + self.peer(rank)


UNDIVIDED = Division()


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The settings with which a rank connects to the other ranks of its engine."""

    rank: int
    division: Division
    # Path of a file, empty at first. Each rank appends the address that it listens on
    rendezvous: str
