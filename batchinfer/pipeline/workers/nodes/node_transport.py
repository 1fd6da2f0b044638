"""Workers on nodes, and engines of which some ranks are there, beside those of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from weakref import WeakKeyDictionary

from batchinfer.core.errors import Unavailable
from batchinfer.engine.ranks.seat import Seat
from batchinfer.machine.spawning import Child, Ended
from batchinfer.pipeline.workers.engine_entry import WORKER
from batchinfer.pipeline.workers.messages import Failed, Loaded, WorkerSpec
from batchinfer.pipeline.workers.nodes.lobby import Lobby
from batchinfer.pipeline.workers.nodes.model_files import digests, folders_of
from batchinfer.pipeline.workers.nodes.node import Files, JoinedNode
from batchinfer.pipeline.workers.nodes.remote_process import RemoteProcess
from batchinfer.pipeline.workers.transport import PROCESSES, Link, ProcessLink

SEEN_S = 0.25  # between the end of a process on a node and that of the node, as they are seen here


class NodeLink:
    """The way to a worker on a node."""

    def __init__(self, process: RemoteProcess) -> None:
        self.process = process
        self.poll, self.wait = process.poll, process.wait
        self.kill, self.close = process.kill, process.close

    def send(self, message: object) -> None:
        """Send a message, if the worker is still there."""
        with suppress(BrokenPipeError):
            self.process.send(message)

    def receive(self) -> object:
        """Receive a message. Moments are those of this machine's clock."""
        message = self.process.recv()
        return Loaded(time.perf_counter()) if isinstance(message, Loaded) else message


class FailedLink:
    """The way to a worker that could not be started, who says why."""

    def __init__(self, why: str) -> None:
        self._said: list[Failed] = [Failed(Unavailable.exit_code, why, "", died=True)]

    def send(self, message: object) -> None:
        """Say nothing: there is nobody."""

    def poll(self, timeout_s: float) -> bool:
        """Whether there is something to receive: always, as an end is."""
        return True

    def receive(self) -> object:
        """Return why there is no worker. Raises EOFError behind that."""
        if not self._said:
            raise EOFError("there is no worker")
        return self._said.pop()

    def wait(self, within_s: float) -> Ended | None:
        """Return that nobody knows how it ended."""
        return None

    def kill(self) -> None:
        """End nothing, as there is no process."""

    def close(self) -> None:
        """Give back nothing, as there is no process."""


class NodeTransport:
    """Starts workers where their places say: on nodes that have joined, or here. One whose node is gone says so when it
    is heard, as a worker does that dies while it loads."""

    def __init__(
        self,
        lobby: Lobby,
        wait_s: float,
        waiting: Callable[[], None],
        known: Callable[[], MutableMapping[str, str]],
    ) -> None:
        """wait_s: for nodes to join, during which `waiting` is called now and then, and for others in the place of lost
        ones; known: digests of files by their identity, see `file_sha256`."""
        self._lobby, self.patience_s, self._waiting, self._known = lobby, wait_s, waiting, known
        # The nodes that a worker was started on: another node may have the number of a lost one by now
        self._nodes = WeakKeyDictionary[Link, list[JoinedNode]]()

    def start(self, spec: WorkerSpec) -> Link:
        """Start a worker. Raises Unavailable where too few nodes join, and OSError where no process can be started."""
        numbers = _nodes_of(spec)
        if not numbers:
            return PROCESSES.start(spec)
        nodes = {one: self._lobby.node(one, self.patience_s, self._waiting) for one in numbers}
        link = self._started(spec, nodes)
        self._nodes[link] = [*nodes.values()]
        return link

    def _started(self, spec: WorkerSpec, nodes: dict[int, JoinedNode]) -> Link:
        files = self._files(spec)
        try:
            if spec.place.node:
                return NodeLink(nodes[spec.place.node].start(spec, files))
            return self._leading(spec, nodes, files)
        except Unavailable as error:
            return FailedLink(str(error))

    def speaking(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Return the links that can be received from."""
        remote = [link for link in links if isinstance(link, NodeLink)]
        ready: list[Link] = [one for one in links if isinstance(one, FailedLink)]
        ready += [link for link in remote if link.process.ready]
        by_end: dict[object, Link] = {link.process: link for link in remote if not link.process.ready}
        by_end |= {link.connection: link for link in links if isinstance(link, ProcessLink)}
        found = wait(list(by_end), 0 if ready else timeout_s)  # type: ignore[arg-type]
        return ready + [by_end[one] for one in found]

    def lost(self, link: Link) -> bool:
        """Whether one of the worker's nodes is gone. The worker's end may be seen before that of its node."""
        return any(node.ends_within(SEEN_S) for node in self._nodes.get(link, ()))

    def missing(self, spec: WorkerSpec) -> str:
        """Name the nodes that are gone."""
        joined = {node.number: node for node in self._lobby.joined}
        lost = [joined[one] for one in _nodes_of(spec) if one in joined and joined[one].gone]
        return " and ".join(f"{node} is gone" for node in lost)

    def _leading(self, spec: WorkerSpec, nodes: dict[int, JoinedNode], files: Files) -> Link:
        """Start an engine's leading rank here, which gets the ways to its ranks on nodes."""
        elsewhere: dict[int, RemoteProcess] = {}
        try:
            for rank, other in enumerate(spec.others, 1):
                if other.place.node:
                    seat = Seat(rank, spec.division)
                    elsewhere[rank] = nodes[other.place.node].start(other, files, seat)
            wires = {rank: process.wire.end() for rank, process in elsewhere.items()}
            known = replace(spec, wires=wires, address=self._lobby.host)
            return ProcessLink(Child(WORKER, known, files=[end.descriptor for end in wires.values()]))
        finally:
            for process in elsewhere.values():
                process.wire.close()  # the leading rank has it, or the node ends what it has started

    def _files(self, spec: WorkerSpec) -> dict[str, dict[str, str]]:
        cache = self._known()
        folders: list[Path] = folders_of(spec)
        return {str(folder): digests(folder, cache) for folder in folders}


def _nodes_of(spec: WorkerSpec) -> list[int]:
    return sorted({one.place.node for one in (spec, *spec.others)} - {0})
