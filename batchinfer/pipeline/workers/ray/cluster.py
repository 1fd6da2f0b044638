"""The connection to a Ray cluster, and the machines on it that can run the engines of a job."""

from __future__ import annotations

import logging
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any

import ray
from ray._private import worker as ray_worker
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from batchinfer.core.errors import Unavailable
from batchinfer.core.wording import counted
from batchinfer.job import Job
from batchinfer.machine.facts import MachineFacts
from batchinfer.pipeline.workers.ray.machine_facts import (
    NodeFacts,
    node_facts,
    share_of,
    version_differences,
    versions,
)
from batchinfer.plan.setup.placement import division_of

CONNECT_S = 30.0
_FACTS_S = 120.0  # limit on the first import of batchinfer on a node, perhaps from a slow disk
_WAIT_S, _TELL_S = 5.0, 60.0  # seconds between checks for a node, and between notices
_NAMED = 8  # largest number of nodes in a message


@dataclass(frozen=True, slots=True)
class EngineShare:
    """The resources that each engine reserves on a node of a Ray cluster.

    Attributes:
        cpus: Number of CPUs.
        gpus: Number of GPUs.
        labels: Names and values of the labels that the node must have.
    """

    cpus: int
    gpus: int
    labels: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        gpus = f" and {counted(self.gpus, 'GPU')}" if self.gpus else ""
        labels = "".join(f", {name}={wanted}" for name, wanted in self.labels)
        return f"{counted(self.cpus, 'CPU')}{gpus}{labels}"

    def fits(self, node: ClusterNode) -> int:
        """Return how many engines fit on a node if nothing else runs there. 0 if it lacks a label."""
        if any(node.labels.get(name) != wanted for name, wanted in self.labels):
            return 0
        by_gpus = int(node.gpus // self.gpus) if self.gpus else sys.maxsize
        return min(int(node.cpus // self.cpus), by_gpus)


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a Ray cluster.

    Attributes:
        number: Ray's ID of the node.
        address: IP address of the node.
        cpus: Number of CPUs.
        gpus: Number of GPUs.
        labels: Values of the node's labels, by name.
    """

    number: str
    address: str
    cpus: float
    gpus: float
    labels: dict[str, str]

    def __str__(self) -> str:
        return f"{self.address} ({self.cpus:g} CPUs, {self.gpus:g} GPUs)"


@dataclass(frozen=True, slots=True)
class ClusterEngines:
    """The resources and nodes on which the engines of a job run in a Ray cluster.

    Attributes:
        address: Address of the cluster.
        share: The resources of one engine.
        facts: Description of the node with the least free memory in the chosen machine class. All engines are
            configured for this node.
        machine: The part of that node that one engine gets.
        others: Ray's IDs of nodes that run no engine, because their machine class or software versions differ.
    """

    address: str
    share: EngineShare
    facts: NodeFacts
    machine: MachineFacts
    others: tuple[str, ...]


def connect(address: str) -> str:
    """Connect this process to a Ray cluster, and return the address of the cluster.

    If the process is connected already, only the address is checked.

    Args:
        address: `ray.address` of the job file.

    Raises:
        Unavailable: There is no cluster at the address, it does not answer within CONNECT_S (30) seconds, or this
            process is connected to another cluster.
    """
    if not ray.is_initialized():
        _connect(address)
    connected = str(ray.get_runtime_context().gcs_address)
    if address not in ("auto", connected) and _is_ip(address) and _is_ip(connected):
        raise Unavailable(
            f"ray.address {address}: this process is connected to the Ray cluster {connected}; "
            "call ray.shutdown() first"
        )
    return connected


def _is_ip(address: str) -> bool:
    # Texts of host names cannot be compared, because a host may have several names
    try:
        ip_address(address.rpartition(":")[0])
    except ValueError:
        return False
    return True


def _connect(address: str) -> None:
    # In a thread, which allows a time limit and keeps Ray from replacing the handler of SIGTERM
    failed: list[BaseException] = []

    def initialise() -> None:
        try:
            ray.init(
                address=address, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False
            )
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            failed.append(error)

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that a thread cannot handle SIGTERM
    # Ray would print errors of its nodes on stdout. No option of Ray prevents that
    ray_worker.print_to_stdstream = lambda *_, **__: None
    thread = threading.Thread(target=initialise, daemon=True, name="ray.init")
    thread.start()
    thread.join(CONNECT_S)
    where = f"ray.address {address}: "
    if thread.is_alive():
        raise Unavailable(
            f"{where}no Ray cluster answers within {CONNECT_S:.0f} s; check it with `ray status`"
        )
    if failed:
        reason = str(failed[0]).strip().splitlines() or [type(failed[0]).__name__]
        raise Unavailable(f"{where}{reason[0]}; check it with `ray status`") from failed[0]


def cluster_engines(
    job: Job, notice: Callable[[str], None], waiting: Callable[[float], bool]
) -> ClusterEngines:
    """Connect to the Ray cluster of a job, and choose the nodes on which its engines will run.

    Nodes with other software versions are left out. Unless the job allows several machine classes, all nodes are of one
    class: the one with room for the most engines.

    Args:
        job: A job with `ray.address`.
        notice: Called with lines for the user.
        waiting: Waits for the given number of seconds, in which a node may join the cluster. Returns False if the run
            must not wait.

    Raises:
        Unavailable: There is no cluster, or no node can run an engine.
    """
    assert job.ray is not None
    address = connect(job.ray.address)
    share, eligible = _awaited_nodes(job, address, notice, waiting)
    by_class: defaultdict[str, list[tuple[ClusterNode, NodeFacts]]] = defaultdict(list)
    unfit = []
    for node, facts in zip(eligible, _facts_of(eligible, share), strict=True):
        why = facts if isinstance(facts, str) else version_differences(versions(), facts)
        if isinstance(facts, str) or why:
            unfit.append((node, f"{node.address}: {why}"))
        else:
            by_class[facts.machine_class].append((node, facts))
    if unfit:
        said = "; ".join(why for _, why in unfit[:_NAMED])
        text = f"{counted(len(unfit), 'node')} of the Ray cluster cannot run engines: {said}"
        if not by_class:
            raise Unavailable(f"{text}; all machines need the same Python, batchinfer, torch and triton")
        notice(text)
    room = {name: sum(share.fits(node) for node, _ in of) for name, of in by_class.items()}
    chosen = min(room, key=lambda name: (-room[name], name))
    any_class = job.ray.classes == "any" and not job.engine.deterministic
    left_out = {} if any_class else {name: of for name, of in by_class.items() if name != chosen}
    others = [node.number for of in left_out.values() for node, _ in of]
    if others:
        notice(
            f"engines run on one class of machine, {chosen}; {counted(len(others), 'node')} of other classes unused"
        )
    least = min((facts for _, facts in by_class[chosen]), key=lambda one: one.machine.free_memory or 0)
    machine = replace(share_of(least, share.cpus), engines=sum(room.values()) if any_class else room[chosen])
    return ClusterEngines(address, share, least, machine, (*others, *(node.number for node, _ in unfit)))


def _awaited_nodes(
    job: Job, address: str, notice: Callable[[str], None], waiting: Callable[[float], bool]
) -> tuple[EngineShare, list[ClusterNode]]:
    # While no node has the resources, a pending task lets an autoscaler add a node
    assert job.ray is not None
    share, eligible = _eligible(job)
    demand, waited_s = None, 0.0
    while not eligible:
        shown = ", ".join(map(str, nodes()[:_NAMED])) or "none"
        text = f"no node of the Ray cluster {address} can have an engine with {share}; its nodes: {shown}"
        demand = demand or _facts_task(share).remote("cpu")
        if waited_s >= job.ray.wait_s or not waiting(_WAIT_S):
            ray.cancel(demand)
            raise Unavailable(f"{text}; lower ray.cpus or ray.gpus, or check ray.labels")
        if not waited_s % _TELL_S:
            notice(f"{text}; waiting up to {job.ray.wait_s - waited_s:.0f} s for a node that can")
        waited_s += _WAIT_S
        share, eligible = _eligible(job)
    return share, eligible


def _facts_task(share: EngineShare) -> Any:
    task: Any = ray.remote(num_cpus=share.cpus, num_gpus=share.gpus, max_retries=0)(node_facts)
    return task.options(label_selector=dict(share.labels))


def _eligible(job: Job) -> tuple[EngineShare, list[ClusterNode]]:
    assert job.ray is not None
    asked, found = job.ray, nodes()
    on_gpu = job.engine.device != "cpu" and asked.gpus != 0
    gpus = asked.gpus if asked.gpus is not None else division_of(job).ranks
    if not on_gpu or (job.engine.device == "auto" and not any(node.gpus >= gpus for node in found)):
        gpus = 0
    if asked.gpus:
        gpus = asked.gpus
    least = EngineShare(asked.cpus or 1, gpus, asked.labels)
    eligible = [node for node in found if least.fits(node)]
    if asked.cpus is None and eligible:
        whole = min(int(node.cpus) for node in eligible)
        engines = min(least.fits(node) for node in eligible) if gpus else 1  # GPUs of a node share its CPUs
        least = replace(least, cpus=max(1, whole // engines))
    return least, eligible


def nodes() -> list[ClusterNode]:
    """Return the nodes of the Ray cluster that are alive."""
    return [
        ClusterNode(
            one["NodeID"],
            one["NodeManagerAddress"],
            one["Resources"].get("CPU", 0.0),
            one["Resources"].get("GPU", 0.0),
            one.get("Labels") or {},
        )
        for one in ray.nodes()
        if one["Alive"]
    ]


def _facts_of(eligible: Sequence[ClusterNode], share: EngineShare) -> list[NodeFacts | str]:
    task: Any = ray.remote(num_cpus=0, max_retries=0)(node_facts)
    device = "cuda" if share.gpus else "cpu"
    places = [NodeAffinitySchedulingStrategy(node.number, soft=False) for node in eligible]
    asked = [task.options(scheduling_strategy=place).remote(device) for place in places]
    ray.wait(asked, num_returns=len(asked), timeout=_FACTS_S)
    return [_fetched(one) for one in asked]


def _fetched(asked: Any) -> NodeFacts | str:
    try:
        found: NodeFacts = ray.get(asked, timeout=0)
    except RayError as error:
        return str(error).strip().splitlines()[-1]
    return found
