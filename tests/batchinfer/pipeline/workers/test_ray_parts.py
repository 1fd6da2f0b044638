"""Parts of a run on Ray that need no cluster: the choice of nodes, and the reasons why actors end."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("ray")

from ray.exceptions import ActorUnavailableError, RayActorError

from batchinfer.core.errors import JobFileError, Unavailable
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.config import LoadConfig
from batchinfer.filesystem.state import state_of
from batchinfer.machine.facts import MachineFacts
from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline import engine_machine
from batchinfer.pipeline.workers.messages import Add, WorkerSpec
from batchinfer.pipeline.workers.ray import cluster, engine_actor
from batchinfer.pipeline.workers.ray.cluster import ClusterNode, cluster_engines
from batchinfer.pipeline.workers.ray.engine_actor import EngineActor, NodeNeeds
from batchinfer.pipeline.workers.ray.machine_facts import NodeFacts
from batchinfer.pipeline.workers.ray.model_files import digests
from batchinfer.pipeline.workers.ray.ray_transport import ActorEnd, _parts
from tests.batchinfer.plan.setup.test_resolve import job_of

EPYC = Hardware("EPYC", "cpu", 8, 64 << 30, {"float32": 8e11}, 1e11, "measured")
H100 = Hardware("H100", "cuda", None, 80 << 30)
VERSIONS = (("batchinfer", "1"), ("torch", "2.13.0"))


def facts(hardware: Hardware = EPYC, free: int = 32 << 30, **more: Any) -> NodeFacts:
    machine = MachineFacts(hardware, cores=8, free_memory=free, gpus=("0", "1") if hardware is H100 else None)
    return NodeFacts("10.0.0.1", machine, VERSIONS, **more)


def node(name: str, cpus: float = 8, gpus: float = 0, **labels: str) -> ClusterNode:
    return ClusterNode(name, f"10.0.0.{len(name)}", cpus, gpus, labels)


Found = Callable[..., cluster.ClusterEngines]


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Found:
    """Describe the engines of a job on nodes with these facts."""

    def describe(*nodes: tuple[ClusterNode, NodeFacts | str], **settings: str) -> cluster.ClusterEngines:
        by_number = {one.number: of for one, of in nodes}
        monkeypatch.setattr(cluster, "connect", lambda _: "head:6379")
        monkeypatch.setattr(cluster, "versions", lambda: VERSIONS)
        monkeypatch.setattr(cluster.ray, "cancel", lambda _: None)
        monkeypatch.setattr(cluster, "_facts_task", lambda _: Mock())
        monkeypatch.setattr(cluster, "nodes", lambda: [one for one, _ in nodes])
        monkeypatch.setattr(cluster, "_facts_of", lambda of, _: [by_number[one.number] for one in of])
        asked = [(f"ray.{name}", value) for name, value in settings.items() if name != "device"]
        device = ("engine.device", settings.get("device", "auto"))
        job = job_of(tmp_path, ("ray.address", "auto"), device, *asked)
        return cluster_engines(job, lambda _: None, lambda _: False)

    return describe


@pytest.mark.parametrize(("init", "said"), [
    (lambda **_: time.sleep(0.5), "no Ray cluster answers within 0 s"),
    (Mock(side_effect=ConnectionError("no cluster\nmore")), "ray.address here:1: no cluster; check it"),
])  # fmt: skip
def test_a_cluster_that_does_not_answer(
    init: Callable[..., None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def as_ray_does(**options: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        init(**options)

    monkeypatch.setattr(cluster.ray, "init", as_ray_does)
    monkeypatch.setattr(cluster, "CONNECT_S", 0.1)
    monkeypatch.setattr(cluster.ray_worker, "print_to_stdstream", None)  # connecting sets it
    with pytest.raises(Unavailable, match=said):
        cluster.connect("here:1")
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_process_keeps_to_one_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: Mock(gcs_address="10.0.0.1:6379"))
    for address in ("auto", "10.0.0.1:6379", "head:6379"):
        assert cluster.connect(address) == "10.0.0.1:6379"
    with pytest.raises(Unavailable, match=r"10\.0\.0\.2:6379: this process is connected to the Ray cluster"):
        cluster.connect("10.0.0.2:6379")


def test_engines_have_all_cpus_of_the_smallest_node(found: Found) -> None:
    head = node("head", cpus=0), facts()
    engines = found(head, (node("a"), facts()), (node("b", cpus=4), facts(free=16 << 30)))
    assert (engines.share.cpus, engines.share.gpus) == (4, 0)
    assert engines.machine.engines == 3  # two of them on the node with 8 CPUs
    assert (engines.machine.cores, engines.machine.free_memory) == (4, 8 << 30)  # half of the smallest node's
    assert engines.machine.hardware.peak_flops == {"float32": 4e11}


def test_a_cluster_with_any_gpu_computes_on_gpus(found: Found) -> None:
    nodes = (node("cpu"), facts()), (node("gpu", gpus=2), facts(H100))
    engines = found(*nodes)
    assert (engines.share.cpus, engines.share.gpus, engines.machine.engines) == (4, 1, 2)
    assert engines.machine.device == "cuda"
    assert found(*nodes, device="cpu").share.gpus == 0


def test_engines_run_on_the_class_with_the_most_room(found: Found) -> None:
    old = facts(replace(EPYC, name="old EPYC"))
    nodes = (node("a"), facts()), (node("b"), old), (node("c"), old)
    engines = found(*nodes)
    assert (engines.machine.engines, engines.others) == (2, ("a",))
    engines = found(*nodes, classes="any")
    assert (engines.machine.engines, engines.others) == (3, ())


def test_labels_choose_nodes(found: Found) -> None:
    nodes = (node("a", zone="x"), facts()), (node("b", zone="y"), facts())
    assert found(*nodes, labels="{zone: y}").machine.engines == 1
    with pytest.raises(
        Unavailable, match=r"no node .* can have an engine with 1 CPU, zone=z; its nodes: 10.0.0.1"
    ):
        found(*nodes, labels="{zone: z}")
    with pytest.raises(Unavailable, match="16 CPUs"):
        found(*nodes, cpus="16")


def test_nodes_that_cannot_run_engines_are_left_out(found: Found) -> None:
    old = replace(facts(), versions=(("batchinfer", "1"), ("torch", "2.12.0")))
    engines = found((node("a"), facts()), (node("b"), old), (node("c"), "No module named 'batchinfer'"))
    assert (engines.machine.engines, engines.others) == (1, ("b", "c"))
    with pytest.raises(
        Unavailable, match=r"1 node .* it has torch 2.12.0 instead of 2.13.0; all machines need"
    ):
        found((node("b"), old))


@pytest.mark.parametrize(("other", "said"), [
    (facts(), ""),
    (replace(facts(), versions=(("batchinfer", "1"), ("torch", "2.12.0"))), "it has torch 2.12.0 instead of 2.13.0"),
    (facts(instructions=("avx2",)), "it is EPYC (avx2), and the engines run on EPYC"),
])  # fmt: skip
def test_other_nodes_are_refused(other: NodeFacts, said: str) -> None:
    needs = NodeNeeds(facts(), any_class=False, files={})
    assert said in needs.refusal(other)
    assert bool(said) == bool(needs.refusal(other))
    assert bool(replace(needs, any_class=True).refusal(other)) == ("torch" in said)


def test_other_model_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = {tmp_path: digests(tmp_path, {}), tmp_path / "gone": {"config.json": "00"}}
    needs = NodeNeeds(facts(), any_class=False, files=files)
    assert "gone cannot be read: No such file or directory" in needs.refusal(facts())
    (tmp_path / "config.json").write_text("{ }")
    assert "config.json differs" in needs.refusal(facts())


def test_long_messages_are_divided() -> None:
    params = SamplingParams()
    requests = [
        Request(bytes(32), np.zeros(tokens, np.int32), params) for tokens in (10, 9_000, 9_000, 20_000, 5)
    ]
    parts = [*_parts(Add(requests))]
    assert [len(part.requests) for part in parts if isinstance(part, Add)] == [2, 1, 1, 1]
    assert [one for part in parts if isinstance(part, Add) for one in part.requests] == requests
    assert [*_parts("word")] == ["word"]


@pytest.mark.parametrize(("error", "lost", "memory", "said"), [
    (ActorUnavailableError("no connection", None), True, False, "lost its node"),
    (RayActorError(error_msg="The actor died because its node has died."), True, False, "lost its node"),
    (RayActorError(error_msg="The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
                             "Worker exit detail: End of file. Some common causes include: (1) the OOM killer"),
     False, False, "was killed or crashed (End of file.)"),
    (RayActorError(error_msg="Worker exit type: NODE_OUT_OF_MEMORY Worker exit detail: low on memory"),
     False, True, "because memory ran out: low on memory"),
])  # fmt: skip
def test_ends_of_actors(error: Exception, lost: bool, memory: bool, said: str) -> None:
    end = ActorEnd.of(error)
    assert (end.lost, end.out_of_memory) == (lost, memory)
    assert said in str(end)


def test_a_run_that_ray_cannot_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, ("ray.address", "auto"))
    submitted = job_of(tmp_path, ("ray.address", "auto"), ("output.path", "runtime_resources/x/out"))
    with pytest.raises(JobFileError, match="which Ray deletes"):
        engine_machine.engine_machine(submitted, state_of(submitted))
    monkeypatch.setattr(engine_machine, "version", lambda _: "2.51.1")
    with pytest.raises(Unavailable, match=r"ray 2.51.1 is installed, and 2.52 to 2.x is needed; .*\.\[ray\]"):
        engine_machine.engine_machine(job, state_of(job))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(Unavailable, match="ray is not installed"):
        engine_machine.engine_machine(job, state_of(job))


def test_engines_know_their_share_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks have their own cores only if the engine has the whole node."""
    monkeypatch.setattr(engine_actor, "usable_cpus", lambda: 8)
    monkeypatch.setattr(engine_actor, "split_cores", lambda parts: [(number,) for number in range(parts)])
    actor = object.__new__(EngineActor)
    spec = WorkerSpec(LoadConfig(tmp_path, "float32", "cpu"), None)
    spec = replace(spec, others=(spec,))
    for cpus, cores in ((8, [(0,), (1,)]), (4, [(), ()])):
        actor._spec, actor._cpus = spec, cpus
        placed = actor._placed(facts())
        assert [one.resources.cores for one in (placed, *placed.others)] == cores
