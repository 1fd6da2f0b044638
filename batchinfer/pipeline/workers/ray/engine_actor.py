"""The actors on nodes of a Ray cluster, which replace the processes of engines and calibrations."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

import ray

from batchinfer.core.errors import Unavailable
from batchinfer.machine.cpus import split_cores, usable_cpus
from batchinfer.machine.memory import available_memory
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.loading import import_function
from batchinfer.pipeline.workers.messages import Configure, EngineResources, Placed, WorkerSpec
from batchinfer.pipeline.workers.ranks.rendezvous import ParentConnection
from batchinfer.pipeline.workers.ray.machine_facts import NodeFacts, node_facts, version_differences
from batchinfer.pipeline.workers.ray.model_files import differences, digests
from batchinfer.pipeline.workers.worker import run_engine

INBOX, OUTBOX = "inbox", "outbox"
GROUPS = {INBOX: 1, OUTBOX: 1}
_LEAVE_S = 30.0  # how long the driver may take to fetch the last messages
_MOST_MESSAGES = 16  # largest number of messages per call


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The properties that a node of a Ray cluster must have to run an engine.

    Attributes:
        facts: Description of a node of the machine class for which the run's setting was chosen.
        any_class: Whether the node may be of another machine class.
        files: For each folder or file that engines read: the SHA-256 of each model file, by file name.
    """

    facts: NodeFacts
    any_class: bool
    files: Mapping[Path, Mapping[str, str]]

    def refusal(self, facts: NodeFacts) -> str:
        """Return the reason why a node must not run an engine, or "" if it may.

        It compares software versions, the machine class, and the digests of model files.

        Args:
            facts: Description of the node on which this process runs.
        """
        if differing := version_differences(self.facts.versions, facts):
            return differing
        if not self.any_class and facts.machine_class != self.facts.machine_class:
            wanted = self.facts.machine_class
            return f"it is {facts.machine_class}, and the engines run on {wanted} (ray.classes: same)"
        for path, expected in self.files.items():
            try:
                found = digests(path, {})
            except OSError as error:
                return f"{path} cannot be read: {error.strerror or error}; put the model on a shared folder"
            if differing := differences(expected, found):
                return f"{path}: {differing}"
        return ""


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The last message of an actor: its engine has ended.

    Attributes:
        status: The exit status that a process would have.
    """

    status: int


class MessageActor(ABC):
    """An actor on a node of a Ray cluster, which works in a thread and exchanges messages with the driver.

    The driver sends messages with `give` and receives messages with `take`. Ray runs these calls in separate threads.
    """

    def __init__(self, needs: NodeNeeds) -> None:
        self._needs = needs
        os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray; the engine sets its own number of threads
        os.environ["HF_HUB_OFFLINE"] = "1"  # forbid downloads, like the command line
        self._inbox, self._outbox = SimpleQueue[object](), SimpleQueue[object]()
        threading.Thread(target=self._run, daemon=True, name="work").start()

    @ray.method(concurrency_group=INBOX)
    def give(self, message: object) -> None:
        """Queue a message from the driver for the thread that works. Called by the driver."""
        self._inbox.put(message)

    @ray.method(concurrency_group=OUTBOX)
    def take(self) -> list[object]:
        """Wait until there are messages to the driver, and return up to 16 of them. Called by the driver."""
        found = [self._outbox.get()]
        while len(found) < _MOST_MESSAGES and not self._outbox.empty():
            found.append(self._outbox.get())
        return found

    # The interface of a connection, for the work

    def send(self, message: object) -> None:
        """Queue a message to the driver, which `take` returns."""
        self._outbox.put(message)

    def recv(self) -> object:
        """Wait for the next message from the driver, and return it."""
        return self._inbox.get()

    def _run(self) -> None:
        status = 1  # also if the work raises SystemExit
        try:
            facts = node_facts(self._needs.facts.machine.device)
            self.send(Placed(facts.name, facts.machine_class))
            if refusal := self._needs.refusal(facts):
                raise Unavailable(f"node {facts.name}: {refusal}")
            self._work(facts)
            status = 0
        except Exception as error:  # noqa: BLE001 - the driver reports every error
            self.send(failure(error))
        finally:
            self.send(EngineEnded(status))

    @abstractmethod
    def _work(self, facts: NodeFacts) -> None:
        """Do the work of the actor, in its thread."""

    def _leave(self, status: int) -> NoReturn:
        self.send(EngineEnded(status))
        threading.Event().wait(_LEAVE_S)
        os._exit(status)


class CallActor(MessageActor):
    """An actor that calls a function in a thread. The function uses the actor as its connection to the driver."""

    def __init__(self, needs: NodeNeeds, target: str, argument: object) -> None:
        """Start the actor, which calls the function in a thread.

        Args:
            needs: The properties that the node must have.
            target: The function, "module:function". It is called with `argument` and this actor, which has the
                interface of a connection.
            argument: The first argument of the function.
        """
        self._target, self._argument = target, argument
        super().__init__(needs)

    def _work(self, facts: NodeFacts) -> None:
        import_function(self._target)(self._argument, self)


class EngineActor(MessageActor):
    """An actor that runs one engine in a thread."""

    def __init__(self, needs: NodeNeeds, spec: WorkerSpec, cpus: int) -> None:
        self._spec, self._cpus, self._memory = spec, cpus, available_memory()
        super().__init__(needs)

    def recv(self) -> object:
        """Wait for the next message from the driver, and return it.

        If the message configures an engine on a CPU, the engine's share of the node's memory is added.
        """
        return self._configured(super().recv())

    def _work(self, facts: NodeFacts) -> None:
        connection: Any = self
        run_engine(self._placed(facts), ParentConnection(connection), self._leave)

    def _placed(self, facts: NodeFacts) -> WorkerSpec:
        spec = self._spec
        ranks = 1 + len(spec.others)
        if ranks == 1:
            return spec
        if facts.machine.device == "cuda":
            resources = [
                EngineResources(gpu=gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:ranks]
            ]
        elif self._cpus >= usable_cpus():
            resources = [EngineResources(cores) for cores in split_cores(ranks)]
        else:  # other engines use the rest of the node, and which cores they use is unknown
            resources = [EngineResources()] * ranks
        own, *others = (
            replace(one, resources=own) for one, own in zip((spec, *spec.others), resources, strict=True)
        )
        return replace(own, others=tuple(others))

    def _configured(self, message: object) -> object:
        if not isinstance(message, Configure) or message.config.load.device != "cpu":
            return message
        part = min(1.0, self._cpus / usable_cpus())
        return Configure(replace(message.config, memory=int(self._memory * part)))
