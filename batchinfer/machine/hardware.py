"""This machine's hardware and its peaks, which were measured, are stated by the maker, or are unknown.

An unknown peak is None, never 0: nothing is divided by it and nothing is claimed from it. No torch here; the
measurement itself is `batchinfer/models/ops/peaks.py`, and `remember` keeps what it found.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from batchinfer.core.errors import UsageError
from batchinfer.machine.cpus import usable_cpus
from batchinfer.machine.datasheet import NAMES, datasheet, full_name
from batchinfer.machine.folders import make_folder
from batchinfer.machine.memory import total_memory
from batchinfer_kernels.arithmetic import Device
from batchinfer_kernels.cost import Peaks

Source = Literal["measured", "datasheet", "unknown"]
PartTimes = Mapping[str, Mapping[str, float]]  # by arithmetic, e.g. `float32` or `bfloat16+int8`
# FLOP/s of matrix products by dtype, by size (`large`, or those of a small model's `layers`) and by who multiplied
ProductRates = Mapping[str, Mapping[str, Mapping[str, float]]]

CACHE_FORMAT = 1
FIRST_WITH_FP8 = (8, 9)  # the first compute capability whose tensor cores know float8_e4m3fn
FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # the last one is aarch64's, for BFDOT
_CPUINFO = Path("/proc/cpuinfo")
_log = logging.getLogger(__name__)


def arithmetic_text(
    dtype: str, quantization: str | None, kv_cache: str | None, deterministic: bool | None
) -> str:
    """Describe the arithmetic for people: `bfloat16 with int8 weights, deterministic`."""
    coded = {"weights": coded_text(quantization), "KV cache": kv_cache}
    parts = [f"{how} {what}" for what, how in coded.items() if how not in (None, "none", "auto")]
    found = f"{dtype} with {' and '.join(parts)}" if parts else dtype
    return found + (", deterministic" if deterministic else "")


def coded_text(quantization: str | None) -> str | None:
    """Describe the type of weights for people: `int8`, `stored fp8`."""
    return "stored fp8" if quantization == "stored" else quantization and quantization.replace("-", " ")


def arithmetic_name(dtype: str, quantization: str = "none") -> str:
    """The key under which step times are kept."""
    return dtype if quantization == "none" else f"{dtype}+{quantization}"


def codes_of(quantization: str, device: Device) -> str | None:
    """Return the type in which products of such weights are computed, as peaks are named; None: in the run's dtype, as
    activations are not quantised. A GPU widens int4 to that dtype, and every device MXFP4; the products of sparse
    weights are half as many, at the peak of that dtype."""
    codes = "fp8" if quantization == "stored" else quantization.removeprefix("stored-")
    if codes in ("none", "mxfp4", "sparse") or (codes == "int4" and device == "cuda"):
        return None
    return "int8" if codes == "int4" else codes


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its peaks. Peaks are per whole device; a dtype that is missing from `peak_flops` is unknown."""

    name: str  # e.g. "AMD EPYC 9B14" or "NVIDIA H200"
    device: Device
    cores: int | None  # CPU cores that this process may use; None on a GPU
    memory_bytes: int | None
    peak_flops: Mapping[str, float] = field(
        default_factory=dict
    )  # FLOP/s by dtype name, `int8` and `fp8` included
    bandwidth: float | None = None  # bytes/s
    source: Source = "unknown"
    # What parts of a step take, by arithmetic, as it was measured here; see batchinfer.plan.simulation.step_parts
    step_times: PartTimes = field(default_factory=dict)
    # Who reached a measured peak, by dtype: `torch` (its libraries) or `compiled` (the CPU operators); may lack dtypes
    peak_by: Mapping[str, str] = field(default_factory=dict)
    # What each of them reached, the slower one, too; may lack dtypes and sizes
    products: ProductRates = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The key under which measured peaks are kept: with other cores, a CPU has other peaks."""
        return f"{self.device}:{self.name}" + (f":{self.cores}" if self.device == "cpu" else "")

    def measured(
        self,
        peak_flops: Mapping[str, float],
        bandwidth: float,
        step_times: PartTimes | None = None,
        peak_by: Mapping[str, str] | None = None,
        products: ProductRates | None = None,
    ) -> Hardware:
        """The same device with what was measured on it."""
        return replace(
            self,
            peak_flops=dict(peak_flops),
            bandwidth=bandwidth,
            source="measured",
            step_times=dict(step_times or {}),
            peak_by=dict(peak_by or {}),
            products=dict(products or {}),
        )

    def step_time(self, dtype: str, quantization: str = "none") -> Mapping[str, float] | None:
        """Return the times of a step's parts in this arithmetic; None where they were not measured."""
        return self.step_times.get(arithmetic_name(dtype, quantization))

    def peaks(self, dtype: str, quantization: str = "none") -> Peaks | None:
        """FLOP/s in `dtype` (and of quantised linear layers) and bytes/s; None unless all of them are known."""
        flops = self.peak_flops.get(dtype)
        if flops is None or self.bandwidth is None:
            return None
        codes = codes_of(quantization, self.device)
        if codes is None:
            return Peaks(flops, self.bandwidth)
        integer = self.peak_flops.get(codes)
        return None if integer is None else Peaks(flops, self.bandwidth, integer)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the driver names it."""

    name: str
    memory_bytes: int | None


def detect(device: str, *, gpu: Gpu | None = None, cache: Path | None = None) -> Hardware:
    """The hardware behind `device` ("cpu", "cuda" or "cuda:N"), with measured peaks where there are any.

    `gpu` names the GPU when the caller knows it better than nvidia-smi, e.g. under CUDA_VISIBLE_DEVICES.
    Raises ValueError for another device.
    """
    if device == "cpu":
        bare = Hardware(cpu_name(), "cpu", usable_cpus(), total_memory())
    elif device == "cuda" or device.startswith("cuda:"):
        bare = _bare_gpu(gpu or _driver_gpu(device))
    else:
        raise ValueError(f"device is {device!r}; known are 'cpu', 'cuda' and 'cuda:N'")
    return _with_peaks(bare, cache or cache_path())


def hardware_called(name: str, cache: Path | None = None) -> Hardware:
    """A GPU that need not be here, with the peaks that its maker states, or that were measured on one of its kind here.

    Raises UsageError for a name that is not known.
    """
    called = full_name(name)
    stated = None if called is None else datasheet(called)
    if called is None or stated is None:
        raise UsageError(f"no GPU called {name!r} is known; those that are: {', '.join(NAMES)}")
    return _with_peaks(_bare_gpu(Gpu(called, stated.memory_bytes)), cache or cache_path())


def _driver_gpu(device: str) -> Gpu | None:
    index = int(device.partition(":")[2] or 0)
    found = nvidia_gpus()
    return found[index] if index < len(found) else None


def _bare_gpu(gpu: Gpu | None) -> Hardware:
    if gpu is None:
        return Hardware("unknown GPU", "cuda", None, None)
    return Hardware(gpu.name, "cuda", None, gpu.memory_bytes)


def _with_peaks(bare: Hardware, cache: Path) -> Hardware:
    measured = read_cache(cache).get(bare.key)
    if measured is not None:
        return bare.measured(
            measured.peak_flops,
            measured.bandwidth,
            measured.step_times,
            measured.peak_by,
            measured.products,
        )
    stated = datasheet(bare.name)
    if stated is not None:
        return replace(
            bare, peak_flops=dict(stated.peak_flops), bandwidth=stated.bandwidth, source="datasheet"
        )
    return bare


# The cache of measured peaks


def cache_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the peaks file: `${XDG_CACHE_HOME:-~/.cache}/batchinfer/hardware.json`."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(base) / "batchinfer" / "hardware.json"


@dataclass(frozen=True, slots=True)
class KeptPeaks:
    """The measurements of a device."""

    peak_flops: dict[str, float]  # FLOP/s by dtype
    bandwidth: float  # bytes/s
    step_times: dict[str, dict[str, float]]  # by arithmetic; empty where they were not measured
    peak_by: dict[str, str]  # who reached the peak, by dtype; empty in a file from before that was kept
    products: dict[str, dict[str, dict[str, float]]]  # likewise

    def to_json(self) -> dict[str, object]:
        return {
            "peak_flops": self.peak_flops,
            "bandwidth": self.bandwidth,
            "step_times": self.step_times,
            "peak_by": self.peak_by,
            "products": self.products,
        }


def read_cache(path: Path) -> dict[str, KeptPeaks]:
    """Read the measurements by `Hardware.key`; none, and a warning is logged, when the file is unusable."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return _parse_cache(raw)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning(
            "%s is ignored (%s); `batchinfer doctor --measure` writes it again", path, error or "unreadable"
        )
        return {}


def _parse_cache(raw: Any) -> dict[str, KeptPeaks]:
    if not isinstance(raw, dict) or raw.get("format") != CACHE_FORMAT:
        raise ValueError(f"not a cache of format {CACHE_FORMAT}")
    devices = raw.get("devices")
    if not isinstance(devices, dict):
        raise ValueError("`devices` is not an object")
    return {key: _parse_peaks(key, entry) for key, entry in devices.items()}


def _parse_peaks(key: str, entry: Any) -> KeptPeaks:
    if not isinstance(entry, dict) or not isinstance(entry.get("peak_flops"), dict):
        raise ValueError(f"{key}: `peak_flops` is not an object")
    flops = {dtype: _positive(key, value) for dtype, value in entry["peak_flops"].items()}
    times = entry.get("step_times", {})  # a file that was written before they were measured has none
    if not isinstance(times, dict) or not all(isinstance(parts, dict) for parts in times.values()):
        raise ValueError(f"{key}: `step_times` is no object of objects")
    by = entry.get("peak_by", {})  # likewise
    if not isinstance(by, dict) or not all(isinstance(who, str) for who in by.values()):
        raise ValueError(f"{key}: `peak_by` is no object of names")
    parsed = {
        name: {part: _number(key, value) for part, value in parts.items()} for name, parts in times.items()
    }
    products = _parse_products(key, entry.get("products", {}))
    return KeptPeaks(flops, _positive(key, entry.get("bandwidth")), parsed, by, products)


def _parse_products(key: str, found: Any) -> dict[str, dict[str, dict[str, float]]]:
    sizes = list(found.values()) if isinstance(found, dict) else [None]
    rates = [of for each in sizes for of in (each.values() if isinstance(each, dict) else [None])]
    if not all(isinstance(of, dict) for of in rates):
        raise ValueError(f"{key}: `products` is no object of objects of objects")
    return {
        dtype: {size: {by: _positive(key, rate) for by, rate in of.items()} for size, of in each.items()}
        for dtype, each in found.items()
    }


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{key}: a step's time has {value!r}, which is no number from 0 on")
    return float(value)


def _positive(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}: a peak is {value!r}, which is no positive number")
    return float(value)


def remember(hardware: Hardware, path: Path | None = None, *, now: datetime | None = None) -> Path:
    """Keep measured peaks for later runs on the same hardware; returns the file. Other devices' entries stay.

    Raises ValueError when there is nothing measured to keep, OSError when the file cannot be written.
    """
    if hardware.bandwidth is None or not hardware.peak_flops:
        raise ValueError(f"{hardware.name}: no peaks to keep")
    target = path or cache_path()
    entries = {key: kept.to_json() for key, kept in read_cache(target).items()}
    times = {name: dict(parts) for name, parts in hardware.step_times.items()}
    products = {
        dtype: {size: dict(rates) for size, rates in sizes.items()}
        for dtype, sizes in hardware.products.items()
    }
    kept = KeptPeaks(dict(hardware.peak_flops), hardware.bandwidth, times, dict(hardware.peak_by), products)
    entry = kept.to_json()
    entries[hardware.key] = entry | {"measured_at": (now or datetime.now(UTC)).isoformat(timespec="seconds")}
    make_folder(target.parent)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps({"format": CACHE_FORMAT, "devices": entries}, indent=1) + "\n", "utf-8")
    os.replace(temporary, target)
    return target


# What the operating system says


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """The CPU's model name; on Apple machines from sysctl; the architecture where nothing names it."""
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    return _cpuinfo_field("model name", cpuinfo) or platform.machine() or "unknown CPU"


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """The instruction set flags of the first core; empty where /proc/cpuinfo does not exist."""
    return frozenset((_cpuinfo_field("flags", cpuinfo) or _cpuinfo_field("Features", cpuinfo)).split())


def has_fast_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """Whether the CPU multiplies bfloat16 in hardware; without it `dtype: auto` means float32. No where this is not
    known, as on macOS."""
    return not FAST_BF16_FLAGS.isdisjoint(cpu_flags(cpuinfo))


def _cpuinfo_field(name: str, cpuinfo: Path) -> str:
    if not cpuinfo.exists():
        return ""
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            label, _, value = line.partition(":")
            if label.strip() == name:
                return value.strip()
    return ""


def nvidia_gpus() -> list[Gpu]:
    """The NVIDIA GPUs that the driver lists, in its order; empty without a driver."""
    text = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    return [_parse_gpu(line) for line in text.splitlines() if line.strip()]


def least_capability(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the least compute capability of the GPUs with these names, of all GPUs if the driver names them otherwise,
    or None if the driver does not report any."""
    text = _output(["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"])
    found = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    named = [gpu for gpu in found if any(name == gpu[0] or gpu[1].startswith(name) for name in names)]
    used = named if len(named) == len(names) else found
    return min((_capability(gpu[-1]) for gpu in used), default=None)


def _capability(text: str) -> tuple[int, ...]:
    """Read a version such as `8.9`; text that is no number gives an empty one, which is less than any other."""
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def usable_gpus(found: Sequence[Gpu], env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The GPUs that CUDA may use, by the names that CUDA_VISIBLE_DEVICES has for them: those that it lists, else all
    that are of the first one's kind, since one answer is to be as fast and as exact as another. `found`: all GPUs."""
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        # CUDA stops there, too
        return tuple(takewhile(lambda name: name and not name.startswith("-"), named))
    return tuple(str(number) for number, gpu in enumerate(found) if gpu.name == found[0].name)


def several_kinds(found: Sequence[Gpu], env: Mapping[str, str] = os.environ) -> bool:
    """Whether those that `usable_gpus` finds may be of several kinds: CUDA_VISIBLE_DEVICES lists them, and the machine
    has several."""
    return "CUDA_VISIBLE_DEVICES" in env and len({gpu.name for gpu in found}) > 1


def _parse_gpu(line: str) -> Gpu:
    name, _, mebibytes = line.rpartition(",")
    size = mebibytes.strip()
    return Gpu(name.strip(), int(size) * 2**20 if size.isdigit() else None)


def _output(command: list[str]) -> str:
    """Return the output of a system command; empty where the command does not exist or fails."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s did not answer: %s", command[0], error)
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
