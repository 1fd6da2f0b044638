"""The actors on nodes of a Ray cluster. Without Ray, each would be a process: an engine, or a calibration."""

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
from batchinfer.machine.cpus import divided_cores, usable_cpus
from batchinfer.machine.memory import available_memory
from batchinfer.pipeline.workers.endings import failure
from batchinfer.pipeline.workers.loading import imported
from batchinfer.pipeline.workers.messages import Configure, EnginePlace, Placed, WorkerSpec
from batchinfer.pipeline.workers.ranks.meeting import Parent
from batchinfer.pipeline.workers.ray.machine_facts import NodeFacts, node_facts, version_differences
from batchinfer.pipeline.workers.ray.model_files import differences, digests
from batchinfer.pipeline.workers.worker import run_engine

INBOX, OUTBOX = "inbox", "outbox"
GROUPS = {INBOX: 1, OUTBOX: 1}
_LEAVE_S = 30.0  # a driver that has not fetched the last messages by then is gone
_MOST_MESSAGES = 16  # that one call returns


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The properties that a node must have to compute for a run."""

    facts: NodeFacts  # of the nodes that the setting was made for
    any_class: bool  # whether another class of machine is allowed
    files: Mapping[Path, Mapping[str, str]]  # sha256 of the model's files, by path and by name

    def refusal(self, facts: NodeFacts) -> str:
        """Return why a node with these facts must not compute; an empty string if it may."""
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
    """The last message of an actor: its engine has ended with an exit status."""

    status: int


class MessageActor(ABC):
    """Exchanges messages with the driver. `give` and `take` are its inbox and outbox; each has a thread of its own."""

    def __init__(self, needs: NodeNeeds) -> None:
        self._needs = needs
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's; the engine sets its threads
        os.environ["HF_HUB_OFFLINE"] = "1"  # as the command line does: no library may download
        self._inbox, self._outbox = SimpleQueue[object](), SimpleQueue[object]()
        threading.Thread(target=self._run, daemon=True, name="work").start()

    @ray.method(concurrency_group=INBOX)
    def give(self, message: object) -> None:
        """Take a message of the driver."""
        self._inbox.put(message)

    @ray.method(concurrency_group=OUTBOX)
    def take(self) -> list[object]:
        """Return the next messages to the driver, waiting for the first one."""
        found = [self._outbox.get()]
        while len(found) < _MOST_MESSAGES and not self._outbox.empty():
            found.append(self._outbox.get())
        return found

    # What the work sees as its connection

    def send(self, message: object) -> None:
        """Send a message to the driver."""
        self._outbox.put(message)

    def recv(self) -> object:
        """Return the next message of the driver, waiting for it."""
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
        except Exception as error:  # noqa: BLE001 - the driver must hear of every error
            self.send(failure(error))
        finally:
            self.send(EngineEnded(status))

    @abstractmethod
    def _work(self, facts: NodeFacts) -> None:
        """Do what the actor is for, in its thread."""

    def _leave(self, status: int) -> NoReturn:
        """End the work from any thread: the driver fetches the last messages, and then ends this actor."""
        self.send(EngineEnded(status))
        threading.Event().wait(_LEAVE_S)
        os._exit(status)


class CallActor(MessageActor):
    """Calls a function in a thread, as a process of its own would."""

    def __init__(self, needs: NodeNeeds, target: str, argument: object) -> None:
        """Take the function "module:function", which gets the argument and a connection."""
        self._target, self._argument = target, argument
        super().__init__(needs)

    def _work(self, facts: NodeFacts) -> None:
        imported(self._target)(self._argument, self)


class EngineActor(MessageActor):
    """Runs one engine in a thread."""

    def __init__(self, needs: NodeNeeds, spec: WorkerSpec, cpus: int) -> None:
        self._spec, self._cpus, self._memory = spec, cpus, available_memory()
        super().__init__(needs)

    def recv(self) -> object:
        """Return the next message of the driver, waiting for it."""
        return self._configured(super().recv())

    def _work(self, facts: NodeFacts) -> None:
        connection: Any = self
        run_engine(self._placed(facts), Parent(connection), self._leave)

    def _placed(self, facts: NodeFacts) -> WorkerSpec:
        """Return the specification with the cores and GPUs of this node."""
        spec = self._spec
        ranks = 1 + len(spec.others)
        if ranks == 1:
            return spec
        if facts.machine.device == "cuda":
            places = [EnginePlace(gpu=gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:ranks]]
        elif self._cpus >= usable_cpus():
            places = [EnginePlace(cores) for cores in divided_cores(ranks)]
        else:  # other engines have the rest of the node, and nothing says which cores
            places = [EnginePlace()] * ranks
        own, *others = (
            replace(one, place=place) for one, place in zip((spec, *spec.others), places, strict=True)
        )
        return replace(own, others=tuple(others))

    def _configured(self, message: object) -> object:
        """Give an engine on a CPU its part of this node's memory."""
        if not isinstance(message, Configure) or message.config.load.device != "cpu":
            return message
        part = min(1.0, self._cpus / usable_cpus())
        return Configure(replace(message.config, memory=int(self._memory * part)))
