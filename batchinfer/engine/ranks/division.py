"""How a model is sharded among ranks. Imports no torch, because the driver uses this module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is sharded among the ranks of an engine. The number of ranks is the product of the fields.

    Attributes:
        tensor: The number of tensor-parallel ranks per pipeline stage.
        stages: The number of pipeline stages.
        experts: The number of expert-parallel ranks per pipeline stage. Each holds a share of the experts, and all
            other weights of the stage's layers.
    """

    tensor: int = 1
    stages: int = 1
    experts: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks of the engine."""
        return self.peers * self.stages

    @property
    def peers(self) -> int:
        """The number of ranks per pipeline stage. They compute the same layers."""
        return self.tensor * self.experts

    def peer(self, rank: int) -> int:
        """Return the index of a rank among the ranks of its pipeline stage."""
        return rank % self.peers

    def stage(self, rank: int) -> int:
        """Return the index of a rank's pipeline stage. Rank 0 has the last stage, because it samples tokens."""
        return (rank // self.peers - 1) % self.stages

    def neighbour(self, rank: int, step: int) -> int | None:
        """Return the rank that holds the corresponding shard in the previous or the next pipeline stage.

        Args:
            rank: A rank.
            step: -1 for the previous stage, 1 for the next stage.

        Returns:
            The rank, or None if there is no such stage.
        """
        stage = self.stage(rank) + step
        if not 0 <= stage < self.stages:
            return None
        return (stage + 1) % self.stages * self.peers + self.peer(rank)


UNDIVIDED = Division()


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The settings with which a rank connects to the other ranks of its engine.

    Attributes:
        rank: The number of the rank.
        division: How the model is sharded.
        rendezvous: The path of a file, empty at first, through which ranks exchange their network addresses.
    """

    rank: int
    division: Division
    rendezvous: str
