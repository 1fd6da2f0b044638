"""The messages between a run and its nodes, beside those of the processes there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchinfer.engine.ranks.seat import Seat
from batchinfer.pipeline.workers.messages import WorkerSpec


@dataclass(frozen=True, slots=True)
class StartProcess:
    """The run orders a process, whose messages go through a connection of their own, which the node opens: `channel` is
    how it is recognised. With a `seat` it is a rank of an engine that has others elsewhere, else a whole engine.

    `files`: the files that it reads, folder by folder, with their sha256 as the run has them."""

    channel: str
    spec: WorkerSpec
    files: Mapping[str, Mapping[str, str]]
    seat: Seat | None = None


@dataclass(frozen=True, slots=True)
class RunOver:
    """The run tells its nodes that it needs them no longer."""


@dataclass(frozen=True, slots=True)
class ProcessEnded:
    """A node tells, as the last message of a process, how it ended; see `spawning.Ended`."""

    code: int | None
    cpu_s: float


ORDERS = (StartProcess, RunOver, ProcessEnded)
