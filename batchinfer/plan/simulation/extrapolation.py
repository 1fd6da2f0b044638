"""The run of a whole job from simulations of parts of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from batchinfer.plan.simulation.simulator import Simulated


@dataclass(frozen=True, slots=True)
class SimulatedPart:
    """A simulated part of a job, with its size: prompt tokens, and output tokens at most."""

    size: int
    run: Simulated


def extrapolated(smaller: SimulatedPart, larger: SimulatedPart, whole: int) -> Simulated:
    """The run of a job of that size, on the line through two parts of it.

    Not in proportion: a run begins by filling the batch and ends with the last answers alone in it, however many rows
    lie between. Raises ValueError where one part is not larger than the other.
    """
    if larger.size <= smaller.size:
        raise ValueError(
            f"parts of {smaller.size} and {larger.size} tokens: the second has to be the larger one"
        )
    times = (whole - larger.size) / (larger.size - smaller.size)
    found = {}
    for name in (field.name for field in fields(Simulated)):
        few, many = getattr(smaller.run, name), getattr(larger.run, name)
        value = max(many + (many - few) * times, many)
        found[name] = round(value) if isinstance(many, int) else value
    return Simulated(**found)
