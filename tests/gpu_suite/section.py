"""A section of the suite: what it is given, what it tells, and how its parts fail alone."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from batchinfer_kernels.arithmetic import KvCacheDtype, Quantization

if TYPE_CHECKING:
    import torch

Told = Callable[[str, dict[str, Any]], None]  # kind of message, and what it says
Part = tuple[str, Callable[[], dict[str, Any]]]  # what it is called, and what gives its result
BANDWIDTH = "bytes_per_s"  # beside the dtypes in `Setting.peaks`


class NoTimeLeft(Exception):
    """The section's time is over; what it has told so far stands."""


class DeviceLost(Exception):
    """Nothing runs on the device any more in this process: an error of a kernel outlasts it."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a known shape, on dummy weights."""

    name: str
    # Share of the memory that is left once the weights are loaded; None: what a job takes that says nothing of it
    kv_memory: float | None = None
    quantization: Quantization = "none"
    kv_cache: KvCacheDtype = "auto"
    rows: int | None = None  # in work at a time; None: as a job
    longest: int | None = None  # tokens of a row; None: those of the longest row of any section

    @property
    def is_plain(self) -> bool:
        """Whether nothing of it is kept in codes."""
        return (self.quantization, self.kv_cache) == ("none", "auto")

    @property
    def codes(self) -> str:
        """What is kept in codes, as it is told of beside the name."""
        weights = "" if self.quantization == "none" else f", {self.quantization} fp8 weights"
        return weights + ("" if self.kv_cache == "auto" else f", {self.kv_cache} KV cache")


@dataclass(frozen=True)
class Setting:
    """What every section is given. It travels to the process that measures."""

    rehearsal: bool  # tiny shapes on the CPU, in Triton's interpreter: nothing is timed
    seconds: float  # how long the section may take
    root: str  # the checkout
    peaks: dict[str, float] = field(
        default_factory=dict
    )  # FLOP/s by dtype, and BANDWIDTH; empty: not measured
    model: Model | None = None  # None: the section runs none
    skip: int = 0  # of its first parts: an earlier process ran them, and the last of them ended it

    @cached_property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu" if self.rehearsal else "cuda")

    @property
    def kind(self) -> str:
        return "cpu" if self.rehearsal else "cuda"


class Section:
    """Tells what comes of a section's parts, one after the other, until its time is over."""

    def __init__(self, setting: Setting, tell: Told, began: float | None = None) -> None:
        """`began`: by the monotonic clock, which all processes of a machine share; None: now."""
        self.setting, self._tell = setting, tell
        self._ends = (time.monotonic() if began is None else began) + setting.seconds
        self._begun = 0  # parts

    @property
    def left_s(self) -> float:
        return self._ends - time.monotonic()

    def result(self, result: dict[str, Any]) -> None:
        self._tell("result", result)

    def failure(self, what: str, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        self._tell(
            "failure", {"what": what, "message": f"{type(error).__name__}: {error}", "traceback": text}
        )

    def parts(self, parts: Iterable[Part]) -> None:
        """Run each part; one that raises is told as a failure, and the others go on.

        Raises NoTimeLeft, which names the parts that were not reached, and DeviceLost, if they have to go on in another
        process.
        """
        waiting = list(parts)
        while waiting:
            if self.left_s <= 0:
                raise NoTimeLeft(f"not reached: {', '.join(name for name, _ in waiting)}")
            name, make = waiting.pop(0)
            self._begun += 1
            if self._begun <= self.setting.skip:
                continue
            self._tell("part", {"number": self._begun})
            try:
                self.result(make())
            except Exception as error:  # whatever it is, it is told, and the others go on
                self.failure(name, error)
                if self.setting.device.type == "cuda" and not _answers():
                    raise DeviceLost(f"lost in {name}") from error


def _answers() -> bool:
    """Whether the device still runs anything for this process."""
    import torch

    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except RuntimeError:
        return False
