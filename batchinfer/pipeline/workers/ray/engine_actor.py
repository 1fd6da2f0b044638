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
from batchinfer.pipeline.workers.loading import imported
from batchinfer.pipeline.workers.messages import Configure, EnginePlace, Placed, WorkerSpec
from batchinfer.pipeline.workers.ranks.meeting import Parent
from batchinfer.pipeline.workers.ray.machine_facts import NodeFacts, node_facts, version_differences
from batchinfer.pipeline.workers.ray.model_files import differences, digests
from batchinfer.pipeline.workers.worker import run_engine

INBOX, OUTBOX = "inbox", "outbox"
GROUPS = {INBOX: 1, OUTBOX: 1}
_LEAVE_S = 30.0  # how long the driver may take to fetch the last messages
_MOST_MESSAGES = 16  # largest number of messages per call


@dataclass(frozen=True, slots=True)
class NodeNeeds:
    """The properties that a node must have to compute for a run."""

    facts: NodeFacts  # of the machine class for which the setting was chosen
    any_class: bool  # whether another class of machine is allowed
    files: Mapping[Path, Mapping[str, str]]  # sha256 of the model's files, by path and by name

    def refusal(self, facts: NodeFacts) -> str:
        """Return the reason why a node with these facts must not compute, or an empty string if it may."""
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
    """Exchanges messages with the driver through `give` and `take`, which run in separate threads."""

    def __init__(self, needs: NodeNeeds) -> None:
        self._needs = needs
        os.environ.pop("OMP_NUM_THREADS", None)  # set by Ray; the engine sets its own number of threads
        os.environ["HF_HUB_OFFLINE"] = "1"  # forbid downloads, like the command line
        self._inbox, self._outbox = SimpleQueue[object](), SimpleQueue[object]()
        threading.Thread(target=self._run, daemon=True, name="work").start()

    @ray.method(concurrency_group=INBOX)
    def give(self, message: object) -> None:
        """Queue a message from the driver."""
        self._inbox.put(message)

    @ray.method(concurrency_group=OUTBOX)
    def take(self) -> list[object]:
        """Return the next messages to the driver, after waiting for the first one."""
        found = [self._outbox.get()]
        while len(found) < _MOST_MESSAGES and not self._outbox.empty():
            found.append(self._outbox.get())
        return found

    # The interface of a connection, for the work

    def send(self, message: object) -> None:
        """Send a message to the driver."""
        self._outbox.put(message)

    def recv(self) -> object:
        """Wait for the next message from the driver and return it."""
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
        """End the work from any thread, after the driver had time to fetch the last messages."""
        self.send(EngineEnded(status))
        threading.Event().wait(_LEAVE_S)
        os._exit(status)


class CallActor(MessageActor):
    """Calls a function in a thread, like a child process on this machine would."""

    def __init__(self, needs: NodeNeeds, target: str, argument: object) -> None:
        """Call the function `target`, "module:function", with the argument and a connection."""
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
        """Wait for the next message from the driver and return it."""
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
            places = [EnginePlace(cores) for cores in split_cores(ranks)]
        else:  # other engines use the rest of the node, and which cores they use is unknown
            places = [EnginePlace()] * ranks
        own, *others = (
            replace(one, place=place) for one, place in zip((spec, *spec.others), places, strict=True)
        )
        return replace(own, others=tuple(others))

    def _configured(self, message: object) -> object:
        """Add the share of this node's memory to the configuration of an engine on a CPU."""
        if not isinstance(message, Configure) or message.config.load.device != "cpu":
            return message
        part = min(1.0, self._cpus / usable_cpus())
        return Configure(replace(message.config, memory=int(self._memory * part)))
