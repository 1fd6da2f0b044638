"""Groups of equal devices in one or several machines, and the links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.machine.hardware import Hardware, hardware_by_name
from batchinfer.machine.links import LOOPBACK, DeviceLink, link_between, network_between

MAX_DEVICES = 64
_SEVERAL = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<count>\d+)x(?P<name>.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices in one machine, or in several equal machines.

    Args:
        hardware: The model and the peaks of each device.
        link: The link between devices of one machine, such as NVLink.
        network: The link between machines.
        in_node: The number of devices per machine.
        nodes: The number of machines.
    """

    hardware: Hardware
    link: DeviceLink
    network: DeviceLink
    in_node: int = 1
    nodes: int = 1

    @property
    def count(self) -> int:
        """Return the number of devices in all machines."""
        return self.in_node * self.nodes

    @property
    def name(self) -> str:
        """Return a description for people, such as "2 machines with 8 × NVIDIA H200 each"."""
        each = f"{self.in_node} × {self.hardware.name}" if self.count > 1 else self.hardware.name
        return f"{self.nodes} machines with {each} each" if self.nodes > 1 else each

    @property
    def links(self) -> str:
        """Return the names of the links between these devices, as text for people."""
        return f"{self.link.name}, {self.network.name}" if self.nodes > 1 else self.link.name

    def in_one_node(self, ranks: int) -> bool:
        """Return True if each group of `ranks` consecutive devices is within one machine."""
        return self.in_node % ranks == 0

    def link_among(self, ranks: int) -> DeviceLink:
        """Return the slowest link between the devices of a group of `ranks` consecutive devices."""
        return self.link if self.in_one_node(ranks) else self.network


def devices_of(hardware: Hardware, count: int = 1) -> Devices:
    """Return `count` equal devices in one machine, with the links that a machine with these devices usually has."""
    link = LOOPBACK if hardware.device == "cpu" else link_between(hardware.name)
    return Devices(hardware, link, network_between(hardware.name), count)


def devices_by_name(name: str, cache: Path | None = None) -> Devices:
    """Return GPUs by name, for a forecast. This machine need not have them.

    Args:
        name: A GPU such as `h100`, several in one machine such as `8xh100`, or in several machines such as `4x8xh100`.
        cache: The file of measured peaks. None: the default file.

    Raises:
        UsageError: The name is unknown, or there are more than MAX_DEVICES devices.
    """
    several = _SEVERAL.fullmatch(name)
    if several is None:
        return devices_of(hardware_by_name(name, cache))
    nodes, count = int(several["nodes"] or 1), int(several["count"])
    if not 1 <= nodes * count <= MAX_DEVICES:
        raise UsageError(f"{name!r} are {nodes * count} GPUs; 1 to {MAX_DEVICES} can be planned for")
    hardware = hardware_by_name(several["name"], cache)
    link, network = link_between(hardware.name), network_between(hardware.name)
    return Devices(hardware, link, network, count, nodes)
