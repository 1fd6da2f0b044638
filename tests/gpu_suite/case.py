"""One kernel at one size: checked first, then timed beside what does the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from batchinfer_kernels.cost import Cost
from tests.suite.clock import Call, the_clock
from tests.suite.section import BenchSection, Result, WrongResult

# ‖ours - right‖ / ‖right‖, where operands and results are of this dtype: a few roundings each
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


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
    # The share of its bound that it is meant to reach, and how many times as fast as which of `others`
    targets: Mapping[str, float] = field(default_factory=dict)

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


def measured(section: BenchSection, case: Case) -> Result:
    """Check a case, then time it. Raises WrongResult. A comparison that raises is noted as a failure and left out."""
    found = case.error()
    error = float(found)
    if not error <= case.tolerance:
        said = found if isinstance(found, Worst) else f"{found:.3g}"
        raise WrongResult(f"{case.name}: off by {said}, where {case.tolerance:.3g} would do")
    calls = {"ours": case.ours}
    for name, call in case.others.items():
        try:
            call()
            calls[name] = call
        except Exception as failure:  # noqa: BLE001 - another's kernel: told, and ours is measured all the same
            section.failed(f"{case.name}: {name}", failure)
    return replace(described(case, error), times=the_clock(section.device).times(calls))


def described(case: Case, error: float | None = None) -> Result:
    """Return what is known of a case before it is timed."""
    facts = {"error": error, "tolerance": case.tolerance}
    return Result(case.name, facts, costs={"": case.cost}, dtype=case.dtype, targets=case.targets)
