"""Collects the facts about this machine that `batchinfer doctor` prints."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from batchinfer.core.version import __version__
from batchinfer.core.wording import size
from batchinfer.machine import hardware
from batchinfer.machine.hardware import Hardware
from batchinfer_kernels.tiles import Grant, tile_grant

PACKAGES = ("torch", "transformers", "tokenizers", "duckdb", "pyarrow", "numpy", "triton")
OPTIONAL = {
    "flashinfer-python": "not installed: `pip install '.[flashinfer]'` in the clone, for prompts on GPUs",
    "flash-attn-4": "not installed: `pip install '.[flash-attn]'` in the clone, for prompts on GPUs",
    "quack-kernels": "not installed: `pip install '.[quack]'` in the clone, for gate and up on GPUs",
}
_X86 = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")
_FLAGS = (*_X86, "asimddp", "i8mm", "bf16")


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report that `batchinfer doctor` prints.

    Args:
        name: The subject of the line, such as "cpu".
        value: The text after the name.
    """

    name: str
    value: str


def doctor(cache: Path | None = None) -> list[Fact]:
    """Return the facts that `batchinfer doctor` prints: versions, CPU, memory, GPUs and known peaks.

    The packages whose versions it returns are not imported.

    Args:
        cache: The file of measured peaks. None: the default file.
    """
    path = cache or hardware.cache_path()
    return [*_versions(), *_cpu(path), *_gpus(path), _cache(path)]


def installed_version(package: str) -> str | None:
    """Return the installed version of a Python package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _versions() -> list[Fact]:
    found = [Fact("batchinfer", __version__)]
    found += [Fact(name, installed_version(name) or "not installed") for name in PACKAGES]
    found += [Fact(name, installed_version(name) or without) for name, without in OPTIONAL.items()]
    return [Fact("python", platform.python_version()), Fact("platform", platform.platform()), *found]


def _cpu(cache: Path) -> list[Fact]:
    flags = hardware.cpu_flags()
    here = hardware.detect("cpu", cache=cache)
    fast = hardware.has_fast_bf16()
    return [
        Fact("cpu", here.name),
        Fact("cores", str(here.cores)),
        Fact("cpu flags", " ".join(flag for flag in _FLAGS if flag in flags) or "none that matter"),
        Fact("fast bfloat16", "yes" if fast else "no: `dtype: auto` means float32 on this CPU"),
        Fact("matrix tiles", tiles_text(tile_grant())),
        Fact("memory", _size(here.memory_bytes)),
        Fact("cpu peaks", peaks_text(here)),
        Fact("cpu products", products_text(here)),
        Fact("cpu steps", steps_text(here)),
    ]


def _gpus(cache: Path) -> list[Fact]:
    found = hardware.nvidia_gpus()
    if not found:
        return [Fact("gpu", "none found (nvidia-smi lists none)")]
    facts = []
    for index, gpu in enumerate(found):
        here = hardware.detect("cuda", gpu=gpu, cache=cache)
        facts += [Fact(f"gpu {index}", f"{gpu.name}, {_size(gpu.memory_bytes)}")]
        facts += [Fact(f"gpu {index} peaks", peaks_text(here))]
    return facts


def _cache(path: Path) -> Fact:
    if not path.exists():
        return Fact("peaks file", f"{path} does not exist")
    kept = hardware.read_cache(path)
    return Fact("peaks file", f"{path}: {', '.join(sorted(kept)) or 'unusable'}")


def peaks_text(here: Hardware) -> str:
    """Describe the known peak speeds of a device and their source in one line, or how to measure them."""
    if here.source == "unknown" or here.bandwidth is None:
        return "unknown: run `batchinfer doctor --measure`"
    flops = ", ".join(_peak_text(here, dtype) for dtype in sorted(here.peak_flops))
    return f"{flops}, memory {_rate(here.bandwidth)}B/s ({here.source})"


def tiles_text(grant: Grant) -> str:
    """Describe in one line whether the CPU's matrix tiles (AMX) are used, or why not."""
    if grant.given:
        return "AMX, granted by the system"
    return f"not used: {grant.refusal}" if grant.refusal else "none known for this CPU"


def _peak_text(here: Hardware, dtype: str) -> str:
    by = here.peak_by.get(dtype)
    return f"{dtype} {_rate(here.peak_flops[dtype])}FLOP/s" + (f" by {by}" if by else "")


def products_text(here: Hardware) -> str:
    """Describe in one line the measured speeds of matrix products, by torch and by the compiled CPU operators."""
    if not here.products:
        return "unknown: run `batchinfer doctor --measure`"
    return "; ".join(
        f"{dtype} {size} {_by_whom(rates)}"
        for dtype, sizes in sorted(here.products.items())
        for size, rates in sorted(sizes.items())
    )


def _by_whom(rates: Mapping[str, float]) -> str:
    return ", ".join(f"{_rate(rate)}FLOP/s by {who}" for who, rate in sorted(rates.items(), reverse=True))


def steps_text(here: Hardware) -> str:
    """Describe in one line for which dtypes and quantisations step times are measured, or how to measure them."""
    if not here.step_times:
        return "unknown, so forecasts of first runs are lower bounds: run `batchinfer doctor --measure`"
    return f"measured in {', '.join(sorted(here.step_times))}"


def _rate(value: float) -> str:
    return f"{value / 1e12:.3g} T" if value >= 1e12 else f"{value / 1e9:.3g} G"


def _size(value: int | None) -> str:
    return "unknown" if value is None else size(value)
