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
from batchinfer.pipeline.workers.messages import Configure, EnginePlace, Failed, Placed, WorkerSpec
from batchinfer.pipeline.workers.ranks.meeting import Parent
from batchinfer.pipeline.workers.ray.machine_facts import NodeFacts, node_facts, version_differences
from batchinfer.pipeline.workers.ray.model_files import differences, digests
from batchinfer.pipeline.workers.worker import run_engine

INBOX, OUTBOX = "inbox", "outbox"
GROUPS = {INBOX: 1, OUTBOX: 1}
_LEAVE_S = 30.0  # a driver that has not fetched the last messages by then is gone
_MOST_MESSAGES = 16  # that one call returns


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """An order describes an engine, and the node that it needs."""

    spec: WorkerSpec
    cpus: int
    facts: NodeFacts  # of the nodes that the setting was made for
    any_class: bool  # whether another class of machine is allowed
    files: Mapping[Path, Mapping[str, str]]  # sha256 by path and by name, of what the engine reads


@dataclass(frozen=True, slots=True)
class EngineEnded:
    """The last message of an actor: its engine has ended with an exit status."""

    status: int


class MessageActor(ABC):
    """Exchanges messages with the driver. `give` and `take` are its inbox and outbox; each has a thread of its own."""

    def __init__(self) -> None:
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
            self._work()
            status = 0
        except Exception as error:  # noqa: BLE001 - the driver must hear of every error
            self.send(failure(error))
        finally:
            self.send(EngineEnded(status))

    @abstractmethod
    def _work(self) -> None:
        """Do what the actor is for, in its thread."""

    def _leave(self, status: int) -> NoReturn:
        """End the work from any thread: the driver fetches the last messages, and then ends this actor."""
        self.send(EngineEnded(status))
        threading.Event().wait(_LEAVE_S)
        os._exit(status)


class CallActor(MessageActor):
    """Calls a function in a thread, as a process of its own would."""

    def __init__(self, target: str, argument: object) -> None:
        """target: the function "module:function"; it gets the argument and a connection."""
        self._target, self._argument = target, argument
        super().__init__()

    def _work(self) -> None:
        self.send(Placed(ray.util.get_node_ip_address(), ""))
        imported(self._target)(self._argument, self)


class EngineActor(MessageActor):
    """Runs one engine in a thread."""

    def __init__(self, order: EngineOrder) -> None:
        self._order, self._memory = order, available_memory()
        super().__init__()

    def recv(self) -> object:
        """Return the next message of the driver, waiting for it."""
        return self._configured(super().recv())

    def _work(self) -> None:
        facts = node_facts(self._order.facts.machine.device)
        self.send(Placed(facts.name, facts.machine_class))
        refusal = self._refusal(facts)
        if refusal:
            self.send(Failed(Unavailable.exit_code, f"node {facts.name}: {refusal}", ""))
        else:
            connection: Any = self
            run_engine(self._placed(facts), Parent(connection), self._leave)

    def _refusal(self, facts: NodeFacts) -> str:
        """Say why this node must not compute; empty: it may."""
        order = self._order
        if differing := version_differences(order.facts.versions, facts):
            return differing
        if not order.any_class and facts.machine_class != order.facts.machine_class:
            wanted = order.facts.machine_class
            return f"it is {facts.machine_class}, and the engines run on {wanted} (ray.classes: same)"
        for path, expected in order.files.items():
            try:
                found = digests(path, {})
            except OSError as error:
                return f"{path} cannot be read: {error.strerror or error}; put the model on a shared folder"
            if differing := differences(expected, found):
                return f"{path}: {differing}"
        return ""

    def _placed(self, facts: NodeFacts) -> WorkerSpec:
        """Return the specification with the cores and GPUs of this node."""
        spec = self._order.spec
        ranks = 1 + len(spec.others)
        if ranks == 1:
            return spec
        if facts.machine.device == "cuda":
            places = [EnginePlace(gpu=gpu) for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:ranks]]
        elif self._order.cpus >= usable_cpus():
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
        part = min(1.0, self._order.cpus / usable_cpus())
        return Configure(replace(message.config, memory=int(self._memory * part)))
