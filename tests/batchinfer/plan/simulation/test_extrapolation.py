"""The run of a whole job, from parts of it."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchinfer.plan.simulation.extrapolation import SimulatedPart, extrapolated
from batchinfer.plan.simulation.simulator import Simulated


def run(start: int, each: int, size: int) -> Simulated:
    """A run with a beginning and an end that do not depend on its size."""
    counts = {field.name: start + each * size for field in fields(Simulated)}
    times = {name: float(counts[name]) for name in ("seconds", "roofline_s")}
    return Simulated(**(counts | times))  # type: ignore[arg-type]


@given(
    st.integers(0, 1000),
    st.integers(0, 100),
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(0, 10_000),
)
def test_beginning_and_end_are_counted_once(start: int, each: int, few: int, more: int, left: int) -> None:
    parts = [SimulatedPart(size, run(start, each, size)) for size in (few, few + more)]
    found, whole = extrapolated(*parts, few + more + left), run(start, each, few + more + left)
    for field in fields(Simulated):
        assert getattr(found, field.name) == pytest.approx(getattr(whole, field.name)), field.name


def test_parts_have_to_differ() -> None:
    part = SimulatedPart(5, run(1, 1, 5))
    with pytest.raises(ValueError, match="parts of 5 and 5 tokens"):
        extrapolated(part, part, 10)
