"""The links by which devices send each other values: how fast they are, and what collectives over them take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_G = 1e9
# What messages are taken to reach of a link's stated speed: a round figure, declared and not measured here. NCCL's
# all-reduce is published to reach 0.7 to 0.8 of NVLink's for large messages.
DECLARED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link between two devices. Collectives go round a ring, in which each device has one neighbour on each side."""

    name: str  # for people
    bytes_per_s: float  # in each of both directions, as the maker states it
    latency_s: float  # of each message
    share: float = DECLARED_SHARE  # of its speed that messages reach

    def send_s(self, size: float) -> float:
        """Return the seconds that a message of `size` bytes takes."""
        return size / (self.bytes_per_s * self.share) + self.latency_s

    def all_reduce_s(self, size: float, ranks: int) -> float:
        """Return the seconds until `ranks` devices have the sum of what each has `size` bytes of: parts of it go round
        twice, once to be added up and once to be told."""
        return 2 * (ranks - 1) * self.send_s(size / ranks)

    def all_gather_s(self, size: float, ranks: int) -> float:
        """Return the seconds until `ranks` devices have what each has `size` bytes of."""
        return (ranks - 1) * self.send_s(size)


# Makers state both directions together: these are half of that. Latencies are assumptions: those of NCCL's small
# messages, of which an all-reduce among 8 GPUs takes 20 to 30 µs over NVLink (14 messages one behind the other).
_NVLINK_2 = DeviceLink("NVLink at 150 GB/s", 150 * _G, 2e-6)
_NVLINK_3 = DeviceLink("NVLink at 300 GB/s", 300 * _G, 2e-6)
_NVLINK_4 = DeviceLink("NVLink at 450 GB/s", 450 * _G, 2e-6)
_PCIE_3 = DeviceLink("PCIe 3.0 at 16 GB/s", 16 * _G, 5e-6)
_PCIE_4 = DeviceLink("PCIe 4.0 at 32 GB/s", 32 * _G, 5e-6)
_PCIE_5 = DeviceLink("PCIe 5.0 at 64 GB/s", 64 * _G, 5e-6)
_LINKS: Mapping[str, DeviceLink] = MappingProxyType(
    {
        "Tesla T4": _PCIE_3,
        "Tesla V100-SXM2-16GB": _NVLINK_2,
        "Tesla V100-SXM2-32GB": _NVLINK_2,
        "NVIDIA A100-SXM4-40GB": _NVLINK_3,
        "NVIDIA A100-SXM4-80GB": _NVLINK_3,
        "NVIDIA H100 80GB HBM3": _NVLINK_4,
        "NVIDIA H200": _NVLINK_4,
        # cards, without bridges, of which there may be some between neighbours
        "NVIDIA H100 PCIe": _PCIE_5,
        "NVIDIA H100 NVL": _PCIE_5,
        "NVIDIA H200 NVL": _PCIE_5,
    }
)
# What a network adapter for each GPU gives in the maker's own machines: DGX A100 (200 Gbit/s), DGX H100 (400 Gbit/s)
_NETWORKS: Mapping[str, DeviceLink] = MappingProxyType(
    {
        "NVIDIA A100-SXM4-40GB": DeviceLink("network at 200 Gbit/s a GPU", 25 * _G, 1e-5),
        "NVIDIA A100-SXM4-80GB": DeviceLink("network at 200 Gbit/s a GPU", 25 * _G, 1e-5),
        "NVIDIA H100 80GB HBM3": DeviceLink("network at 400 Gbit/s a GPU", 50 * _G, 1e-5),
        "NVIDIA H200": DeviceLink("network at 400 Gbit/s a GPU", 50 * _G, 1e-5),
    }
)
_ETHERNET = DeviceLink("network at 100 Gbit/s a GPU", 12.5 * _G, 2e-5)  # an assumption
# What ranks on one CPU send each other by: through its memory, as gloo does. Two of them on two Zen 4 server cores that
# others used, too, took 160 to 200 µs to add up a few KB, and 0.5 to 15 ms for 1 to 16 MiB (1 to 2 GB/s).
LOOPBACK = DeviceLink("this machine's memory", 2 * _G, 1e-4)


def link_between(gpu: str) -> DeviceLink:
    """Return the link between GPUs of a machine, by nvidia-smi's name of them."""
    return _LINKS.get(gpu, _PCIE_4)


def network_between(gpu: str) -> DeviceLink:
    """Return what machines with such GPUs send each other by."""
    return _NETWORKS.get(gpu, _ETHERNET)
