"""The transport of a run: to nodes, where its job has them, else as the run's options say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batchinfer.filesystem.remembered import read_strings
from batchinfer.filesystem.state import StateFolder
from batchinfer.job import Job
from batchinfer.pipeline.workers.interrupts import CONTINUES, Interrupts
from batchinfer.pipeline.workers.nodes.lobby import Lobby
from batchinfer.pipeline.workers.nodes.node_transport import NodeTransport
from batchinfer.pipeline.workers.nodes.token import read_token
from batchinfer.pipeline.workers.transport import Transport


@contextmanager
def nodes_joining(
    job: Job, otherwise: Transport, state: StateFolder, interrupts: Interrupts, notice: Callable[[str], None]
) -> Iterator[Transport]:
    """Let the job's nodes join within the block. Raises what `read_token` raises, and Unavailable where nothing can
    listen."""
    nodes = job.engine.nodes
    if nodes is None:
        yield otherwise
        return
    with Lobby(nodes.address, read_token(nodes.token_file), nodes.count, notice) as lobby:
        yield NodeTransport(
            lobby,
            nodes.wait_s,
            waiting=lambda: interrupts.raise_pending(CONTINUES),
            known=lambda: read_strings(state.fingerprints),
        )
