"""One kernel at one size: checked, then timed in turns with other implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchinfer_kernels.cost import Cost
from tests.suite.clock import Call, the_clock
from tests.suite.section import BenchSection, Part, Result, WrongResult

DTYPE = torch.bfloat16  # dtype of activations in all cases
# ‖ours - right‖ / ‖right‖ with operands and results in bfloat16: a few roundings each
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Worst:
    """The largest relative error of a row and head."""

    error: float
    row: int
    head: int

    def __float__(self) -> float:
        return self.error

    def __str__(self) -> str:
        return f"{self.error:.3g} in row {self.row}, head {self.head}"


def distance(ours: Any, right: Any) -> float:
    """Return ‖ours - right‖ / ‖right‖ in float64, or NaN if either contains NaN. For several tensors, the maximum."""
    if not isinstance(ours, Tensor):
        return max(map(distance, ours, right))
    wide = right.double()
    return float(torch.linalg.vector_norm(ours.double() - wide) / torch.linalg.vector_norm(wide))


def worst(ours: Tensor, right: Tensor) -> Worst:
    """Return the (row, head) with the largest `distance`, for tensors (rows, heads, dim).

    NaN counts as the largest.
    """
    wide = right.double()
    off = torch.linalg.vector_norm(ours.double() - wide, dim=2) / torch.linalg.vector_norm(wide, dim=2)
    at = int(off.nan_to_num(nan=torch.inf, posinf=torch.inf).argmax())
    return Worst(float(off.flatten()[at]), *divmod(at, off.shape[1]))


def different(ours: Tensor, right: Tensor) -> float:
    """Return the share of values that differ."""
    return float((ours != right).double().mean())


@dataclass(frozen=True, slots=True)
class Case:
    """A call of a kernel. `right` computes the expected result, and `others` do the same work."""

    kernel: str
    size: str
    cost: Cost
    ours: Call
    right: Call
    others: Mapping[str, Call] = field(default_factory=dict)
    off: Callable[[Any, Any], float | Worst] = distance  # returns the error of `ours` against `right`
    tolerance: float = TOLERANCE
    dtype: str = "bfloat16"  # the dtype whose peak bounds the FLOPs
    # Goals: the share of the roofline, and the speedup over one of `others`
    targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.kernel}, {self.size}"

    def error(self) -> float | Worst:
        """Run the call and return its error."""
        return self.off(self.ours(), self.right())


def part(section: BenchSection, make: Callable[..., Case], *sizes: object) -> Part:
    """Return a part that makes, checks and times a case, named after its maker and its sizes."""
    kernel = make.__name__.removesuffix("_case").replace("_", " ")
    name = " ".join([kernel, *(_told(size) for size in sizes if size is not None)])
    return name, lambda: measured(section, make(section, *sizes))


def _told(value: object) -> str:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return str(value)
    return f"{len(value)} × {min(value)}…{max(value)}"


def measured(section: BenchSection, case: Case) -> Result:
    """Check a case, then time it.

    Raises WrongResult. A comparison that raises is recorded as a failure and skipped.
    """
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
    """Return the facts of a case before it is timed."""
    facts = {"error": error, "tolerance": case.tolerance}
    return Result(case.name, facts, costs={"": case.cost}, dtype=case.dtype, targets=case.targets)


def random(section: BenchSection, *shape: int) -> Tensor:
    """Return normal numbers in bfloat16."""
    return torch.randn(shape, device=section.device).to(DTYPE)
