"""Links between devices: their speeds, and the time of collectives over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_G = 1e9
# Assumed share of a link's stated speed that messages reach; not measured here. For NCCL's all-reduce of large messages
# over NVLink, 0.7 to 0.8 is published
DECLARED_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class DeviceLink:
    """A link between two devices, and the time of messages and collectives over it.

    Args:
        name: The name for people, such as "NVLink at 450 GB/s".
        bytes_per_s: The speed per direction in bytes/s, from the datasheet.
        latency_s: The latency of a message in seconds.
        share: The share of `bytes_per_s` that messages reach, 0 to 1.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    share: float = DECLARED_SHARE

    def send_s(self, size: float) -> float:
        """Return the seconds to send a message of `size` bytes."""
        return size / (self.bytes_per_s * self.share) + self.latency_s

    def all_reduce_s(self, size: float, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of a tensor of `size` bytes among `ranks` devices."""
        return 2 * (ranks - 1) * self.send_s(size / ranks)

    def all_gather_s(self, size: float, ranks: int) -> float:
        """Return the seconds of a ring all-gather of a tensor of `size` bytes from each of `ranks` devices."""
        return (ranks - 1) * self.send_s(size)


# Half of the vendors' bandwidths, which add up both directions. Latencies are assumptions from NCCL's small messages:
# an all-reduce among 8 GPUs over NVLink (14 sequential messages) takes 20 to 30 µs
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
        # Cards, assumed to have no NVLink bridges
        "NVIDIA H100 PCIe": _PCIE_5,
        "NVIDIA H100 NVL": _PCIE_5,
        "NVIDIA H200 NVL": _PCIE_5,
    }
)
# One network adapter per GPU, as in NVIDIA's machines: DGX A100 (200 Gbit/s), DGX H100 (400 Gbit/s)
_NETWORKS: Mapping[str, DeviceLink] = MappingProxyType(
    {
        "NVIDIA A100-SXM4-40GB": DeviceLink("network at 200 Gbit/s a GPU", 25 * _G, 1e-5),
        "NVIDIA A100-SXM4-80GB": DeviceLink("network at 200 Gbit/s a GPU", 25 * _G, 1e-5),
        "NVIDIA H100 80GB HBM3": DeviceLink("network at 400 Gbit/s a GPU", 50 * _G, 1e-5),
        "NVIDIA H200": DeviceLink("network at 400 Gbit/s a GPU", 50 * _G, 1e-5),
    }
)
_ETHERNET = DeviceLink("network at 100 Gbit/s a GPU", 12.5 * _G, 2e-5)  # an assumption
# Ranks on one CPU communicate through memory (gloo). On two shared Zen 4 server cores, an all-reduce of two ranks took
# 160 to 200 µs for a few KB, and 0.5 to 15 ms for 1 to 16 MiB (1 to 2 GB/s)
LOOPBACK = DeviceLink("this machine's memory", 2 * _G, 1e-4)


def link_between(gpu: str) -> DeviceLink:
    """Return the usual link between GPUs of one machine, given the GPU's name in nvidia-smi; PCIe 4.0 if unknown."""
    return _LINKS.get(gpu, _PCIE_4)


def network_between(gpu: str) -> DeviceLink:
    """Return the usual network between machines with a GPU, given its name in nvidia-smi; 100 Gbit/s if unknown."""
    return _NETWORKS.get(gpu, _ETHERNET)
