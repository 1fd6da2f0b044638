"""Peaks from NVIDIA's datasheets for well-known GPUs, without sparsity.

Names are as printed by `nvidia-smi --query-gpu=name`. Other GPUs are unknown; their peaks are not guessed. float32 is
the rate without tensor cores, as PyTorch does not use TF32 by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_T = 1e12


@dataclass(frozen=True, slots=True)
class Datasheet:
    """The vendor's peaks of a GPU.

    Args:
        peak_flops: FLOP/s by dtype, including "int8" and "fp8".
        bandwidth: The bandwidth of its memory in bytes/s.
        memory_bytes: The size of its memory in bytes.
    """

    peak_flops: Mapping[str, float]
    bandwidth: float
    memory_bytes: int


def _gpu(
    half: float,
    single: float,
    int8: float | None,
    terabytes: float,
    gigabytes: int,
    *,
    bfloat16: bool = True,
    fp8: bool = False,
) -> Datasheet:
    # Peaks in TFLOP/s by dtype, TB/s and GB of memory. bfloat16 has the peak of float16, and fp8 that of int8. Tensor
    # cores support int8 since Turing, bfloat16 since Ampere, and fp8 since Ada and Hopper
    flops = {"float16": half * _T, "float32": single * _T}
    if int8 is not None:
        flops["int8"] = int8 * _T
        if fp8:
            flops["fp8"] = int8 * _T
    if bfloat16:
        flops["bfloat16"] = half * _T
    return Datasheet(MappingProxyType(flops), terabytes * _T, gigabytes * 10**9)


_V100_16 = _gpu(125, 15.7, None, 0.900, 16, bfloat16=False)  # V100 datasheet, SXM2 column
_V100_32 = _gpu(125, 15.7, None, 0.900, 32, bfloat16=False)
_A100_40 = _gpu(312, 19.5, 624, 1.555, 40)  # A100 datasheet, 40 GB
# H100 Tensor Core GPU Architecture whitepaper, table 2, SXM5
_H100_SXM = _gpu(989.4, 66.9, 1978.9, 3.35, 80, fp8=True)

_DATASHEETS: Mapping[str, Datasheet] = MappingProxyType(
    {
        "Tesla T4": _gpu(65, 8.1, 130, 0.320, 16, bfloat16=False),  # T4 product brief PB-09256
        "Tesla V100-SXM2-16GB": _V100_16,
        "Tesla V100-SXM2-32GB": _V100_32,
        "NVIDIA A10": _gpu(125, 31.2, 250, 0.600, 24),  # A10 datasheet
        "NVIDIA A30": _gpu(165, 10.3, 330, 0.933, 24),  # A30 datasheet
        "NVIDIA A40": _gpu(149.7, 37.4, 299.3, 0.696, 48),  # A40 datasheet
        "NVIDIA A100-SXM4-40GB": _A100_40,
        "NVIDIA A100-PCIE-40GB": _A100_40,
        "NVIDIA A100-SXM4-80GB": _gpu(312, 19.5, 624, 2.039, 80),  # A100 datasheet, 80 GB SXM
        "NVIDIA A100 80GB PCIe": _gpu(312, 19.5, 624, 1.935, 80),  # A100 datasheet, 80 GB PCIe
        "NVIDIA H100 80GB HBM3": _H100_SXM,
        "NVIDIA H100 PCIe": _gpu(756, 51.2, 1513, 2.0, 80, fp8=True),  # H100 whitepaper, table 2, PCIe
        "NVIDIA H100 NVL": _gpu(
            835.5, 60, 1671, 3.9, 94, fp8=True
        ),  # H100 NVL datasheet, half of the sparse peak
        "NVIDIA H200": _gpu(
            989.4, 66.9, 1978.9, 4.8, 141, fp8=True
        ),  # H200 datasheet, SXM, half of the sparse peak
        "NVIDIA H200 NVL": _gpu(
            835.5, 60, 1671, 4.8, 141, fp8=True
        ),  # H200 datasheet, NVL, half of the sparse peak
        "NVIDIA L4": _gpu(121, 30.3, 242.5, 0.300, 24, fp8=True),  # L4 datasheet, half of the sparse peak
        "NVIDIA L40": _gpu(181.05, 90.5, 362, 0.864, 48, fp8=True),  # L40 datasheet
        "NVIDIA L40S": _gpu(362.05, 91.6, 733, 0.864, 48, fp8=True),  # L40S datasheet
    }
)


def datasheet(name: str) -> Datasheet | None:
    """Return the datasheet of a GPU by its name in nvidia-smi; None for an unknown GPU."""
    return _DATASHEETS.get(name)


# Short names of these GPUs, for `batchinfer plan --hardware`
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "t4": "Tesla T4",
        "v100-16gb": "Tesla V100-SXM2-16GB",
        "v100": "Tesla V100-SXM2-32GB",
        "a10": "NVIDIA A10",
        "a30": "NVIDIA A30",
        "a40": "NVIDIA A40",
        "a100-40gb": "NVIDIA A100-SXM4-40GB",
        "a100": "NVIDIA A100-SXM4-80GB",
        "a100-pcie": "NVIDIA A100 80GB PCIe",
        "h100": "NVIDIA H100 80GB HBM3",
        "h100-pcie": "NVIDIA H100 PCIe",
        "h100-nvl": "NVIDIA H100 NVL",
        "h200": "NVIDIA H200",
        "h200-nvl": "NVIDIA H200 NVL",
        "l4": "NVIDIA L4",
        "l40": "NVIDIA L40",
        "l40s": "NVIDIA L40S",
    }
)


def full_name(name: str) -> str | None:
    """Return the name that nvidia-smi prints for a GPU, given this name or a short one such as "h100".

    The result is None if the GPU is unknown.
    """
    full = NAMES.get(name.casefold(), name)
    return full if full in _DATASHEETS else None
