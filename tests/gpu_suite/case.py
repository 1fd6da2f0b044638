"""One kernel at one size: checked first, then timed beside what does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cost import Cost
from tests.gpu_suite.clock import Call, Clock, HostClock
from tests.gpu_suite.section import Section

# ‖ours - right‖ / ‖right‖, where operands and results are of this dtype: a few roundings each
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


class WrongResult(Exception):
    """A kernel computed something else: nothing of it is timed."""


@dataclass(frozen=True, slots=True)
class Worst:
    """How far the worst row and head is from right."""

    error: float
    row: int
    head: int

    def __float__(self) -> float:
        return self.error

    def __str__(self) -> str:
        return f"{self.error:.3g} in row {self.row}, head {self.head}"


@dataclass(frozen=True, slots=True)
class Case:
    """`others` do the same work. `error` is how far `ours` is from right, a fraction; it is made for each check."""

    kernel: str
    size: str
    cost: Cost
    dtype: str  # whose peak the FLOPs are held against
    ours: Call
    error: Callable[[], float | Worst]
    tolerance: float
    others: Mapping[str, Call] = field(default_factory=dict)
    target: float | None = None  # share of its bound that it is meant to reach
    # How many times as fast as which of `others` it is meant to be
    aim: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.size}"


def distance(ours: Tensor, right: Tensor) -> float:
    """‖ours - right‖ / ‖right‖ in float64; NaN where either has one."""
    wide = right.double()
    norm = torch.linalg.vector_norm(wide)
    return float(torch.linalg.vector_norm(ours.double() - wide) / norm)


def worst(ours: Tensor, right: Tensor) -> Worst:
    """The row and head with the largest `distance`, of (rows, heads, dim); NaN where either has one."""
    wide = right.double()
    off = torch.linalg.vector_norm(ours.double() - wide, dim=2) / torch.linalg.vector_norm(wide, dim=2)
    at = int(off.nan_to_num(nan=torch.inf, posinf=torch.inf).argmax())
    return Worst(float(off.flatten()[at]), *divmod(at, off.shape[1]))


def different(ours: Tensor, right: Tensor) -> float:
    """The share of values that are not equal."""
    return float((ours != right).double().mean())


def measured(section: Section, case: Case) -> dict[str, Any]:
    """Raises WrongResult. A comparison that raises is told as a failure of its own and left out."""
    found = case.error()
    error = float(found)
    if not error <= case.tolerance:
        said = found if isinstance(found, Worst) else f"{found:.3g}"
        raise WrongResult(f"{case.name}: off by {said}, where {case.tolerance:.3g} would do")
    others = {name: call for name, call in case.others.items() if _works(section, case, name, call)}
    return {**described(case), "error": error, **_timed(section, case, others)}


def described(case: Case) -> dict[str, Any]:
    """What is known of a case before it has run."""
    return {
        "kind": "kernel",
        "kernel": case.kernel,
        "size": case.size,
        "dtype": case.dtype,
        "flops": case.cost.flops,
        "bytes": case.cost.bytes,
        "int8_ops": case.cost.coded_ops,
        "tolerance": case.tolerance,
        "target": case.target,
        "aim": dict(case.aim),
    }


def _works(section: Section, case: Case, name: str, call: Call) -> bool:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - another's kernel: told, and ours is measured all the same
        section.failure(f"{case.name}: {name}", error)
        return False
    return True


def _timed(section: Section, case: Case, others: Mapping[str, Call]) -> dict[str, Any]:
    times = the_clock(section.setting.device).times({"": case.ours, **others})
    return {
        "ours": times.pop("").to_json(),
        "others": {name: found.to_json() for name, found in times.items()},
    }


@cache
def the_clock(device: torch.device) -> Clock | HostClock:
    """Return the one clock of all cases: a GPU's holds a large buffer."""
    return Clock(device) if device.type == "cuda" else HostClock()
