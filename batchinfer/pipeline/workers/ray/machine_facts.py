"""The facts of a Ray cluster's node that determine whether it computes the same bits as other nodes."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import ray

from batchinfer.core.version import __version__
from batchinfer.machine.facts import MachineFacts, this_machine
from batchinfer_kernels.arithmetic import Device

# Instruction sets that determine the code of the compiled operators and of torch's libraries
_INSTRUCTION_SETS = ("avx", "avx2", "avx_vnni", "amx", "asimd", "bf16", "fma", "i8mm", "sve")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """The description of a node of a Ray cluster, as plain values that can be sent to the driver.

    Attributes:
        name: IP address of the node.
        machine: Device, memory and cores of the node.
        versions: Pairs of the name and the version of the software with which engines compute, such as torch.
        instructions: Instruction sets of the CPU. Empty for an engine on GPUs.
    """

    name: str
    machine: MachineFacts
    versions: tuple[tuple[str, str], ...]
    instructions: tuple[str, ...] = ()

    @property
    def machine_class(self) -> str:
        """Return the class of the node's machine.

        Engines on machines of the same class compute the same bits.
        """
        hardware, machine = self.machine.hardware, self.machine
        if machine.device == "cuda":
            capability = ".".join(map(str, machine.capability or ()))
            return f"{hardware.name} (compute capability {capability or 'unknown'})"
        tiles = ", matrix tiles" if machine.tiles else ""
        return f"{hardware.name} ({' '.join(self.instructions) or platform.machine()}{tiles})"


def node_facts(device: Device) -> NodeFacts:
    """Describe the node on which this process runs. Runs as a task of Ray.

    Args:
        device: The device of the engines.
    """
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from a task that reserves none
    machine = this_machine(device)
    instructions = () if machine.device == "cuda" else tuple(_instructions())
    return NodeFacts(ray.util.get_node_ip_address(), machine, versions(), instructions)


def versions() -> tuple[tuple[str, str], ...]:
    """Return pairs of the name and the version of the software with which engines compute on this machine."""
    return tuple(_versions())


def _versions() -> Iterator[tuple[str, str]]:
    major, minor, _ = platform.python_version_tuple()
    yield from (("batchinfer", __version__), ("Python", f"{major}.{minor}"))
    for name in ("torch", "triton"):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def _instructions() -> Iterator[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    line = next((one for one in text.splitlines() if one.startswith(("flags", "Features"))), "")
    for flag in sorted(line.partition(":")[2].split()):
        if flag in _INSTRUCTION_SETS or flag.startswith(("avx512", "amx_", "sve")):
            yield flag


def share_of(facts: NodeFacts, cpus: int) -> MachineFacts:
    """Return the part of a node that an engine with `cpus` CPUs gets. An engine on GPUs gets whole GPUs.

    Args:
        facts: Description of the node.
        cpus: Number of CPUs of the engine.
    """
    machine = facts.machine
    if machine.device == "cuda":
        return replace(machine, cores=cpus)
    part = min(1.0, cpus / (machine.cores or cpus))
    free = None if machine.free_memory is None else int(machine.free_memory * part)
    hardware = machine.hardware
    if part < 1:  # the times of steps were measured with all cores
        rates = {name: rate * part for name, rate in hardware.peak_flops.items()}
        bandwidth = None if hardware.bandwidth is None else hardware.bandwidth * part
        hardware = replace(
            hardware, cores=cpus, peak_flops=rates, bandwidth=bandwidth, step_times={}, products={}
        )
    return replace(machine, hardware=hardware, cores=cpus, free_memory=free)


def version_differences(expected: Sequence[tuple[str, str]], found: NodeFacts) -> str:
    """Return a text such as "it has torch 2.12.0 instead of 2.13.0", or "" if the node has all expected versions.

    Args:
        expected: Pairs of name and version that the node must have.
        found: Description of the node.
    """
    theirs = dict(found.versions)
    pairs = ((name, theirs.get(name), wanted) for name, wanted in expected)
    text = ", ".join(f"{name} {has} instead of {wanted}" for name, has, wanted in pairs if has != wanted)
    return f"it has {text}" if text else ""
