"""Starts engines on a Ray cluster, and exchanges messages with them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayError

from batchinfer.engine.config import LoadConfig
from batchinfer.pipeline.workers.messages import Add, Loaded, Placed, WorkerSpec
from batchinfer.pipeline.workers.ray.cluster import ClusterEngines
from batchinfer.pipeline.workers.ray.engine_actor import (
    GROUPS,
    CallActor,
    EngineActor,
    EngineEnded,
    MessageActor,
    NodeNeeds,
)
from batchinfer.pipeline.workers.ray.model_files import digests, folders_of
from batchinfer.pipeline.workers.transport import Link

# Messages are split, because Ray sends arguments above 100 KB through its object store, which takes ten times as long
_SPLIT_BYTES = 64 << 10
_ROW_BYTES = 512  # size of a request without its tokens
# Phrases in Ray's error about an actor whose node is gone, and about one killed because its node ran out of memory
_NODE_GONE = ("its node has died", "node was preempted", "node is drain", "node was drain", "node failure")
_NO_MEMORY = ("NODE_OUT_OF_MEMORY", "low on memory", "memory pressure")
_MOST_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class ActorEnd:
    """The way an actor on a Ray cluster ended. It implements `WorkerEnd`.

    Attributes:
        text: A phrase that completes "the engine's process ...".
        lost: Whether the actor's node is gone or cannot be reached.
        out_of_memory: Whether Ray killed the actor because memory ran out.
        out_of_cpu_time: Always False.
    """

    text: str
    lost: bool = False
    out_of_memory: bool = False
    out_of_cpu_time: bool = False

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, error: Exception) -> ActorEnd:
        """Create the description of an actor's end from the error that Ray raises."""
        text = str(error)
        gone = isinstance(error, ActorUnavailableError) or getattr(error, "preempted", False)
        if gone or any(one in text for one in _NODE_GONE):
            return cls("lost its node", lost=True)
        cause = text.partition(" Some common causes")[0]
        if isinstance(error, OutOfMemoryError) or any(one in cause for one in _NO_MEMORY):
            return cls(f"was killed by Ray because memory ran out: {_reason(text)}", out_of_memory=True)
        return cls(f"was killed or crashed ({_reason(text)})")


def _reason(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = next((line for line in lines if "because" in line or "Worker exit" in line), lines[-1])
    return reason.rpartition("Worker exit detail: ")[2].partition(" Some common causes")[0][:_MOST_CHARACTERS]


class RayLink:
    """The driver's connection to an actor on a Ray cluster.

    A remote call of the actor's `take` is always pending. It returns when the actor has messages.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._taken = actor.take.remote()
        self._messages: deque[object] = deque()
        self._end: ActorEnd | None = None
        self.placed = False

    @property
    def lost(self) -> bool:
        """Return True if the actor ended because its node is gone."""
        return self._end is not None and self._end.lost

    @property
    def open_call(self) -> Any:
        """Return the pending call of the actor's `take`, or None if `receive` need not wait for it.

        It need not wait if it can return a message, or if the actor has ended.
        """
        return None if self._messages or self._end is not None else self._taken

    def send(self, message: object) -> None:
        """Send a message to the actor unless it has ended."""
        if self._end is None:
            for part in _parts(message):
                self._actor.give.remote(part)

    def poll(self, timeout_s: float) -> bool:
        """Return True if `receive` would not block, after waiting for at most `timeout_s` seconds."""
        if self.open_call is None:
            return True
        ready, _ = ray.wait([self._taken], timeout=timeout_s)
        if ready:
            self.fetch()
        return bool(ready)

    def fetch(self) -> None:
        """Store the messages that the finished call of `take` has returned, and start the next call."""
        try:
            found = ray.get(self._taken)
        except RayError as error:
            self._end, self.placed = ActorEnd.of(error), True
            return
        for message in found:
            self.placed |= isinstance(message, Placed)
            if isinstance(message, EngineEnded):
                self._end = ActorEnd(f"ended with exit status {message.status}")
                return
            # replaced, because the clock of a node differs from the driver's
            self._messages.append(Loaded(time.perf_counter()) if isinstance(message, Loaded) else message)
        self._taken = self._actor.take.remote()

    def receive(self) -> object:
        """Return the next message of the actor, and wait for it if necessary.

        Raises:
            EOFError: The actor has ended and all its messages were returned.
        """
        while not self._messages:
            if self._end is not None:
                raise EOFError("the actor has ended")
            self.poll(1.0)
        return self._messages.popleft()

    def wait(self, within_s: float) -> ActorEnd | None:
        """Return how the actor ended, or None if it is still running after `within_s` seconds."""
        until = time.monotonic() + within_s
        while self._end is None and (left_s := until - time.monotonic()) > 0:
            if ray.wait([self._taken], timeout=left_s)[0]:
                self.fetch()
        return self._end

    def kill(self) -> None:
        """End the actor now. It may still run for a moment, but its messages are no longer received."""
        ray.kill(self._actor, no_restart=True)
        self._end = self._end or ActorEnd("was ended")

    def close(self) -> None:
        """End the actor if it is still running. May be called twice."""
        self.kill()


def _parts(message: object) -> Iterator[object]:
    # Small enough for Ray to send the message within a call
    if not isinstance(message, Add):
        yield message
        return
    part, size = list[Any](), 0
    for request in message.requests:
        row_size = _ROW_BYTES + 4 * len(request.prompt)
        if part and size + row_size > _SPLIT_BYTES:
            yield Add(part)
            part, size = [], 0
        part.append(request)
        size += row_size
    yield Add(part)


class RayTransport:
    """Starts each worker as an actor on a Ray cluster, with the resources that the job reserves for an engine."""

    def __init__(
        self, engines: ClusterEngines, any_class: bool, wait_s: float, known: MutableMapping[str, str]
    ) -> None:
        """Prepare to start actors.

        Args:
            engines: The resources of an engine, and the nodes that may run one.
            any_class: Whether engines may run on any machine class.
            wait_s: Number of seconds to wait for resources while no engine has any.
            known: Known digests of files, for `file_sha256`. New digests are added.
        """
        self._engines, self._any_class, self._known = engines, any_class, known
        self._files: dict[Path, Mapping[str, str]] = {}
        self.wait_s = wait_s

    def start(self, spec: WorkerSpec) -> Link:
        """Start an actor for an engine, and return the connection to it.

        The actor may have to wait for resources of the cluster.

        Args:
            spec: Specification of the worker.
        """
        cpus = self._engines.share.cpus
        reads = folders_of(spec.load, spec.tokenizer)
        return RayLink(self._start_actor(EngineActor, reads, _with_threads(spec, cpus), cpus))

    def call(self, target: str, argument: object, load: LoadConfig) -> Link:
        """Start an actor that calls a function, and return the connection to it.

        The actor reserves the resources of an engine.

        Args:
            target: The function, "module:function". It is called with `argument` and the actor's end of the connection.
            argument: The first argument of the function.
            load: The model that the function reads.
        """
        return RayLink(self._start_actor(CallActor, folders_of(load, None), target, argument))

    def _start_actor(self, kind: type[MessageActor], reads: Sequence[Path], *arguments: object) -> Any:
        needs = NodeNeeds(self._engines.facts, self._any_class, {path: self._digests(path) for path in reads})
        share, others = self._engines.share, self._engines.others
        labels = dict(share.labels) | ({"ray.io/node-id": f"!in({','.join(others)})"} if others else {})
        actor: Any = ray.remote(concurrency_groups=GROUPS)(kind)
        options = {"num_cpus": share.cpus, "num_gpus": share.gpus, "label_selector": labels}
        once = {"max_restarts": 0, "max_task_retries": 0, "enable_task_events": False}
        return actor.options(**options, **once).remote(needs, *arguments)

    def _digests(self, path: Path) -> Mapping[str, str]:
        if path not in self._files:
            self._files[path] = digests(path, self._known)
        return self._files[path]

    def can_use_standby(self, spec: WorkerSpec) -> bool:
        """Return False, because engines run on nodes of the cluster and not in a process of this machine."""
        return False

    def wait_for_messages(self, links: Sequence[Link], timeout_s: float) -> list[Link]:
        """Wait until a worker has sent a message or has ended, and return the links of all such workers.

        Args:
            links: The links of the workers.
            timeout_s: Maximum number of seconds to wait. After this time, the result is empty.
        """
        ours = [link for link in links if isinstance(link, RayLink)]
        waiting = {link.open_call: link for link in ours if link.open_call is not None}
        if waiting:
            timeout_s = timeout_s if len(waiting) == len(ours) else 0
            ready, rest = ray.wait([*waiting], timeout=timeout_s)
            if ready and rest:
                ready += ray.wait(rest, num_returns=len(rest), timeout=0)[0]
            for call in ready:
                waiting[call].fetch()
        return [link for link in ours if link.open_call is None]

    @property
    def wanted(self) -> str:
        """Return a phrase that describes the node for which an engine waits."""
        return f"node of the Ray cluster {self._engines.address} with {self._engines.share} free"


def _with_threads(spec: WorkerSpec, cpus: int) -> WorkerSpec:
    if spec.load.threads is not None:
        return spec
    return replace(spec, load=replace(spec.load, threads=cpus))
