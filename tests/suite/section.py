"""A section of a suite: its declaration, the inputs of its parts, and their results."""

from __future__ import annotations

import statistics
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchinfer_kernels.arithmetic import KvCacheDtype, Quantization
from batchinfer_kernels.cost import Cost

if TYPE_CHECKING:
    import torch

BANDWIDTH = "bytes_per_s"  # among the dtypes of `BenchSection.peaks`
Option = tuple[tuple[str, ...], dict[str, Any]]  # what argparse's add_argument takes


class WrongResult(Exception):
    """A part computed something other than intended: nothing of it is timed."""


@dataclass(frozen=True, slots=True)
class BenchModel:
    name: str
    # Share of the memory that remains after the weights are loaded; None: a job's default
    kv_memory: float | None = None
    quantization: Quantization = "none"
    kv_cache: KvCacheDtype = "auto"
    rows: int | None = None  # maximum of running rows; None: a job's default
    longest: int | None = None  # maximum tokens of a row; None: of the longest row of any section

    @property
    def is_plain(self) -> bool:
        """Return True if the model has no quantised values."""
        return (self.quantization, self.kv_cache) == ("none", "auto")

    @property
    def text(self) -> str:
        """Return the name, with the parts that are quantised."""
        weights = "" if self.quantization == "none" else f", {self.quantization} fp8 weights"
        return self.name + weights + ("" if self.kv_cache == "auto" else f", {self.kv_cache} KV cache")


@dataclass(frozen=True, slots=True)
class SuiteEntry:
    """Declares a section.

    `source`: the module whose `parts(section)` returns the measurements, or `module:function`.
    """

    name: str
    share: float  # share of the time; unused time goes to later sections
    source: str
    model: BenchModel | None = None  # the model that the section runs; a process loads one model
    calls: tuple[str, ...] = ()  # the commands that it belongs to
    about: str = ""
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a call in seconds.

    Attributes:
        host_s: time of the host to queue it once.
    """

    median_s: float
    min_s: float
    runs: int
    host_s: float

    @classmethod
    def of(cls, seconds: Sequence[float], host_s: float = 0.0) -> Times:
        return cls(statistics.median(seconds), min(seconds), len(seconds), host_s)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a part. A rehearsal keeps only its name and facts, which do not depend on time.

    Attributes:
        times: our time first, then the times of others for equal work.
        metrics: numbers by name; the suffix is the unit (`_s`, `_share`, `_bytes`, `_per_s`).
        targets: goals of `share`, of a metric, or of the times relative to another one.
    """

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    times: Mapping[str, Times] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)  # cost of each operator in the timed call
    dtype: str = "bfloat16"  # the dtype whose peak bounds the FLOPs
    codes_dtype: str = "int8"  # the dtype whose peak bounds operations on quantised values
    tokens: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    targets: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)  # only for the record


Part = tuple[str, Callable[[], Result | list[Result]]]


@dataclass
class BenchSection:
    """The setting of a section's parts, sent to the measuring process."""

    rehearsal: bool  # tiny shapes on the CPU
    ends: float  # deadline by the monotonic clock, which all processes of a machine share
    # FLOP/s by dtype, BANDWIDTH; empty: not measured
    peaks: Mapping[str, float] = field(default_factory=dict)
    model: BenchModel | None = None  # None: the section runs none
    given: Namespace = field(default_factory=Namespace)  # the section's options
    place: Path = Path()  # a folder for the files of all its parts, empty at first
    failures: list[dict[str, str]] = field(default_factory=list)

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def left_s(self) -> float:
        return self.ends - time.monotonic()

    def failed(self, what: str, error: Exception) -> None:
        """Record a failure that does not end the part."""
        text = "".join(traceback.format_exception(error))
        said = {"what": what, "message": f"{type(error).__name__}: {error}", "traceback": text}
        self.failures.append(said)
