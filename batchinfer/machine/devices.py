"""Several devices that are alike: those of a machine, or of several machines, and the links between them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from batchinfer.core.errors import UsageError
from batchinfer.machine.hardware import Hardware, hardware_called
from batchinfer.machine.links import LOOPBACK, DeviceLink, link_between, network_between

MOST_DEVICES = 64
_SEVERAL = re.compile(r"(?:(?P<nodes>\d+)x)?(?P<count>\d+)x(?P<name>.+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Devices:
    """Devices of the same kind: `in_node` of them in each of `nodes` machines."""

    hardware: Hardware  # each of them
    link: DeviceLink  # of those of one machine
    network: DeviceLink  # between machines
    in_node: int = 1
    nodes: int = 1

    @property
    def count(self) -> int:
        """Count all of them."""
        return self.in_node * self.nodes

    @property
    def name(self) -> str:
        """Return what people call all of them together."""
        each = f"{self.in_node} × {self.hardware.name}" if self.count > 1 else self.hardware.name
        return f"{self.nodes} machines with {each} each" if self.nodes > 1 else each

    @property
    def links(self) -> str:
        """Name the links that there are."""
        return f"{self.link.name}, {self.network.name}" if self.nodes > 1 else self.link.name

    def in_one_node(self, ranks: int) -> bool:
        """Whether each of successive groups of so many devices has all of them in one machine."""
        return self.in_node % ranks == 0

    def link_among(self, ranks: int) -> DeviceLink:
        """Return the slowest link that such groups have."""
        return self.link if self.in_one_node(ranks) else self.network


def devices_of(hardware: Hardware, count: int = 1) -> Devices:
    """Return so many devices of a kind, in one machine."""
    link = LOOPBACK if hardware.device == "cpu" else link_between(hardware.name)
    return Devices(hardware, link, network_between(hardware.name), count)


def devices_called(name: str, cache: Path | None = None) -> Devices:
    """Return GPUs that need not be here: `h100`, eight of them in a machine as `8xh100`, four of these as `4x8xh100`.

    Raises UsageError for a name that is not known, and for more than MOST_DEVICES.
    """
    several = _SEVERAL.fullmatch(name)
    if several is None:
        return devices_of(hardware_called(name, cache))
    nodes, count = int(several["nodes"] or 1), int(several["count"])
    if not 1 <= nodes * count <= MOST_DEVICES:
        raise UsageError(f"{name!r} are {nodes * count} GPUs; 1 to {MOST_DEVICES} can be planned for")
    hardware = hardware_called(several["name"], cache)
    link, network = link_between(hardware.name), network_between(hardware.name)
    return Devices(hardware, link, network, count, nodes)
