"""The process of a rank other than rank 0: runs the steps that rank 0 sends."""

from __future__ import annotations

import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from batchinfer.engine.ranks.division import RankConfig
from batchinfer.machine.garbage import freeze_existing_objects
from batchinfer.machine.spawning import receiving
from batchinfer.pipeline.workers.endings import failure, leave, restrict_process
from batchinfer.pipeline.workers.loading import RankLoading
from batchinfer.pipeline.workers.messages import Finish, Left, WorkerSpec
from batchinfer.pipeline.workers.ranks.rendezvous import ParentConnection


def main(spec: WorkerSpec, rank_config: RankConfig, connection: Connection[Any, Any]) -> None:
    """Run a rank other than rank 0, as the entry point of its process.

    Args:
        spec: The specification of the rank.
        rank_config: The number of the rank, and how it connects to the other ranks.
        connection: The connection to rank 0.
    """
    parent = ParentConnection(connection)
    try:
        restrict_process(spec.resources)
        follower = RankLoading(spec, rank_config, parent).follower()
        with freeze_existing_objects():
            _follow(follower, parent)
    except EOFError:  # rank 0 is gone
        leave(0)
    except BaseException as error:  # noqa: BLE001 - rank 0 reports every error
        with suppress(BrokenPipeError, ConnectionResetError):
            parent.send(failure(error))
        raise SystemExit(1) from None
    leave(0)


def _follow(follower: Any, connection: ParentConnection) -> None:
    waited_s, began = 0.0, None  # the wait for the first step does not count
    while True:
        with receiving():
            message = connection.recv()
        if isinstance(message, Finish):
            loads, use = follower.account.read_loads(), follower.account.use(waited_s)
            connection.send(Left(use.peak_rss_bytes, None, loads, (use,)))
            return
        waited_s += 0.0 if began is None else time.perf_counter() - began
        follower.run(message)
        began = time.perf_counter()
