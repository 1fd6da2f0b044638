"""Devices and their peak speeds, which are measured, from a datasheet, or unknown.

An unknown peak is None, never 0. `batchinfer/models/ops/peaks.py` measures peaks, and `remember` stores them. Imports
no torch.
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
# FLOP/s of matrix products by dtype, by size (`large`, or `layers` of a small model) and by library
ProductRates = Mapping[str, Mapping[str, Mapping[str, float]]]

CACHE_FORMAT = 1
FIRST_WITH_FP8 = (8, 9)  # the first compute capability whose tensor cores support float8_e4m3fn
FAST_BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # "bf16" is aarch64's flag for BFDOT
_CPUINFO = Path("/proc/cpuinfo")
_log = logging.getLogger(__name__)


def arithmetic_text(
    dtype: str, quantization: str | None, kv_cache: str | None, deterministic: bool | None
) -> str:
    """Describe the number formats of a run for people, such as `bfloat16 with int8 weights, deterministic`.

    Args:
        dtype: The dtype of activations.
        quantization: The value of model.quantization. None or "none": weights are not quantised.
        kv_cache: The dtype of the KV cache. None or "auto": it is not quantised.
        deterministic: True if the run is deterministic.
    """
    coded = {"weights": coded_text(quantization), "KV cache": kv_cache}
    parts = [f"{how} {what}" for what, how in coded.items() if how not in (None, "none", "auto")]
    found = f"{dtype} with {' and '.join(parts)}" if parts else dtype
    return found + (", deterministic" if deterministic else "")


def coded_text(quantization: str | None) -> str | None:
    """Describe a value of model.quantization for people, such as `int8` or `stored fp8`. None stays None."""
    return "stored fp8" if quantization == "stored" else quantization and quantization.replace("-", " ")


def arithmetic_name(dtype: str, quantization: str = "none") -> str:
    """Return the name of a run's number formats: "bfloat16", or with quantised weights "bfloat16+int8".

    It is a key of `Hardware.step_times`.
    """
    return dtype if quantization == "none" else f"{dtype}+{quantization}"


def codes_of(quantization: str, device: Device) -> str | None:
    """Return the type of quantised values that matrix products multiply, as a key of `Hardware.peak_flops`.

    Args:
        quantization: The value of model.quantization.
        device: The device that computes.

    Returns:
        "int8" or "fp8". None if products are computed in the run's dtype, because weights are not quantised or are
        dequantised first (int4 on a GPU, MXFP4).
    """
    codes = "fp8" if quantization == "stored" else quantization.removeprefix("stored-")
    if codes in ("none", "mxfp4", "sparse") or (codes == "int4" and device == "cuda"):
        return None
    return "int8" if codes == "int4" else codes


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device, and its known peak speeds.

    Args:
        name: The model, such as "AMD EPYC 9B14" or "NVIDIA H200".
        device: "cpu" or "cuda".
        cores: The number of CPU cores that this process may use. None for a GPU.
        memory_bytes: The size of the device's memory in bytes. None: unknown.
        peak_flops: FLOP/s by dtype, including "int8" and "fp8". A missing dtype is unknown.
        bandwidth: The bandwidth of the memory in bytes/s. None: unknown.
        source: Where the peaks are from: a measurement, a datasheet, or unknown.
        step_times: Measured coefficients that predict the duration of a step, by `arithmetic_name` and part of the step
            (see batchinfer.plan.simulation.step_parts).
        peak_by: The library that reached a measured peak, by dtype: "torch" or "compiled" (the CPU operators). May be
            incomplete.
        products: Measured FLOP/s of matrix products, by dtype, size and library. May be incomplete.
    """

    name: str
    device: Device
    cores: int | None
    memory_bytes: int | None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float | None = None
    source: Source = "unknown"
    step_times: PartTimes = field(default_factory=dict)
    peak_by: Mapping[str, str] = field(default_factory=dict)
    products: ProductRates = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return the key of the device in the file of measured peaks. For a CPU, it contains the number of cores."""
        return f"{self.device}:{self.name}" + (f":{self.cores}" if self.device == "cpu" else "")

    def measured(
        self,
        peak_flops: Mapping[str, float],
        bandwidth: float,
        step_times: PartTimes | None = None,
        peak_by: Mapping[str, str] | None = None,
        products: ProductRates | None = None,
    ) -> Hardware:
        """Return a copy of the device with measured peaks.

        Args:
            peak_flops: FLOP/s by dtype.
            bandwidth: The bandwidth of the memory in bytes/s.
            step_times: Coefficients that predict the duration of a step, by `arithmetic_name` and part of the step.
                None: not measured.
            peak_by: The library that reached the peak, by dtype. None: unknown.
            products: FLOP/s of matrix products, by dtype, size and library. None: not measured.
        """
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
        """Return the coefficients that predict the duration of a step, by part of the step; None if not measured.

        Args:
            dtype: The dtype of activations.
            quantization: The value of model.quantization.
        """
        return self.step_times.get(arithmetic_name(dtype, quantization))

    def peaks(self, dtype: str, quantization: str = "none") -> Peaks | None:
        """Return the peak FLOP/s and bytes/s of a run on this device; None if any of them is unknown.

        Args:
            dtype: The dtype of activations.
            quantization: The value of model.quantization, which determines the peak of quantised layers.
        """
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
    """A GPU that the driver lists.

    Args:
        name: The name in nvidia-smi, such as "NVIDIA H200".
        memory_bytes: The size of its memory in bytes. None: unknown.
    """

    name: str
    memory_bytes: int | None


def detect(device: str, *, gpu: Gpu | None = None, cache: Path | None = None) -> Hardware:
    """Return a device of this machine, with peaks that are measured, from the datasheet, or unknown.

    Args:
        device: "cpu", "cuda" or "cuda:N".
        gpu: The GPU. None: the GPU that nvidia-smi lists at index N, although CUDA_VISIBLE_DEVICES may order GPUs
            differently.
        cache: The file of measured peaks. None: the default file.

    Raises:
        ValueError: `device` has another form.
    """
    if device == "cpu":
        bare = Hardware(cpu_name(), "cpu", usable_cpus(), total_memory())
    elif device == "cuda" or device.startswith("cuda:"):
        bare = _bare_gpu(gpu or _driver_gpu(device))
    else:
        raise ValueError(f"device is {device!r}; it can be 'cpu', 'cuda' or 'cuda:N'")
    return _with_peaks(bare, cache or cache_path())


def hardware_by_name(name: str, cache: Path | None = None) -> Hardware:
    """Return a GPU by name, with measured peaks, or the peaks of its datasheet. This machine need not have it.

    Args:
        name: The name in nvidia-smi, or a short name such as "h100".
        cache: The file of measured peaks. None: the default file.

    Raises:
        UsageError: The name is unknown.
    """
    full = full_name(name)
    stated = None if full is None else datasheet(full)
    if full is None or stated is None:
        raise UsageError(f"unknown GPU {name!r}; it can be {', '.join(NAMES)}")
    return _with_peaks(_bare_gpu(Gpu(full, stated.memory_bytes)), cache or cache_path())


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
    """Return the path of the file of measured peaks: `${XDG_CACHE_HOME:-~/.cache}/batchinfer/hardware.json`."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".cache")
    return Path(base) / "batchinfer" / "hardware.json"


@dataclass(frozen=True, slots=True)
class KeptPeaks:
    """The measurements of a device in the file of measured peaks.

    Args:
        peak_flops: FLOP/s by dtype.
        bandwidth: The bandwidth of the memory in bytes/s.
        step_times: Coefficients that predict the duration of a step, by `arithmetic_name` and part of the step. Empty:
            not measured.
        peak_by: The library that reached the peak, by dtype. Empty in files of older versions.
        products: FLOP/s of matrix products, by dtype, size and library. Empty in files of older versions.
    """

    peak_flops: dict[str, float]
    bandwidth: float
    step_times: dict[str, dict[str, float]]
    peak_by: dict[str, str]
    products: dict[str, dict[str, dict[str, float]]]

    def to_json(self) -> dict[str, object]:
        """Return the measurements as the JSON object that the file of measured peaks contains for the device."""
        return {
            "peak_flops": self.peak_flops,
            "bandwidth": self.bandwidth,
            "step_times": self.step_times,
            "peak_by": self.peak_by,
            "products": self.products,
        }


def read_cache(path: Path) -> dict[str, KeptPeaks]:
    """Read the file of measured peaks, and return its measurements by `Hardware.key`.

    If the file is unusable, log a warning and return {}.
    """
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
    times = entry.get("step_times", {})  # missing in files of older versions
    if not isinstance(times, dict) or not all(isinstance(parts, dict) for parts in times.values()):
        raise ValueError(f"{key}: `step_times` is no object of objects")
    by = entry.get("peak_by", {})  # missing in files of older versions
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
    """Store measured peaks for later runs on the same hardware. Entries of other devices are kept.

    Args:
        hardware: The device with its measurements.
        path: The file of measured peaks. None: the default file.
        now: The time of the measurement. None: the current time.

    Returns:
        The path of the file.

    Raises:
        ValueError: The device has no measurements.
        OSError: The file cannot be written.
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


# Facts from the operating system


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """Return the model name of this machine's CPU, or the architecture if the system reports no name."""
    if sys.platform == "darwin":
        return _output(["sysctl", "-n", "machdep.cpu.brand_string"]) or platform.machine()
    return _cpuinfo_field("model name", cpuinfo) or platform.machine() or "unknown CPU"


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Return the CPU's instruction set flags, such as "avx2"; an empty set without /proc/cpuinfo."""
    return frozenset((_cpuinfo_field("flags", cpuinfo) or _cpuinfo_field("Features", cpuinfo)).split())


def has_fast_bf16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return True if the CPU multiplies bfloat16 in hardware; False if not, or if unknown as on macOS."""
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
    """Return this machine's NVIDIA GPUs in the order of nvidia-smi; [] without a driver."""
    text = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"])
    return [_parse_gpu(line) for line in text.splitlines() if line.strip()]


def min_capability(names: Sequence[str]) -> tuple[int, ...] | None:
    """Return the lowest compute capability of some GPUs, such as (9, 0); None if the driver reports none.

    Args:
        names: Numbers or UUIDs of the GPUs. If the driver does not know all of them, all GPUs of the machine are
            considered.
    """
    text = _output(["nvidia-smi", "--query-gpu=index,uuid,compute_cap", "--format=csv,noheader"])
    found = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    named = [gpu for gpu in found if any(name == gpu[0] or gpu[1].startswith(name) for name in names)]
    used = named if len(named) == len(names) else found
    return min((_capability(gpu[-1]) for gpu in used), default=None)


def _capability(text: str) -> tuple[int, ...]:
    # () is lower than any version
    parts = text.split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def usable_gpus(found: Sequence[Gpu], env: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the GPUs that CUDA may use, by their names for CUDA_VISIBLE_DEVICES.

    If CUDA_VISIBLE_DEVICES is not set, the result is all GPUs of the same model as the first GPU.

    Args:
        found: All GPUs of the machine.
        env: The environment variables.
    """
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        named = [name.strip() for name in visible.split(",")]
        # Like CUDA, ignore all entries from the first invalid one on
        return tuple(takewhile(lambda name: name and not name.startswith("-"), named))
    return tuple(str(number) for number, gpu in enumerate(found) if gpu.name == found[0].name)


def several_kinds(found: Sequence[Gpu], env: Mapping[str, str] = os.environ) -> bool:
    """Return True if CUDA_VISIBLE_DEVICES is set, and the machine has GPUs of different models.

    Then the GPUs that CUDA may use are possibly different models.

    Args:
        found: All GPUs of the machine.
        env: The environment variables.
    """
    return "CUDA_VISIBLE_DEVICES" in env and len({gpu.name for gpu in found}) > 1


def _parse_gpu(line: str) -> Gpu:
    name, _, mebibytes = line.rpartition(",")
    size = mebibytes.strip()
    return Gpu(name.strip(), int(size) * 2**20 if size.isdigit() else None)


def _output(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.warning("%s did not answer: %s", command[0], error)
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
