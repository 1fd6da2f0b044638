"""Extrapolates the run of a whole job from simulated parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from batchinfer.core.request import Request
from batchinfer.plan.order.backlog import tokens_of
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.simulator import SimulatedEngine, SimulatedTotals, simulate


@dataclass(frozen=True, slots=True)
class SimulatedPart:
    """The simulated run of some requests of a job.

    Attributes:
        size: Number of prompt tokens plus maximum number of output tokens, over all these requests.
        run: The totals of the simulated run.
    """

    size: int
    run: SimulatedTotals


def simulate_part(
    machine: SimulatedEngine, requests: Sequence[Request], lengths: AnswerLengths
) -> SimulatedPart:
    """Simulate the run of some requests.

    Args:
        machine: The engine.
        requests: The requests, in order of execution.
        lengths: Forecasts the answer lengths.
    """
    size = sum(map(tokens_of, requests))
    return SimulatedPart(size, simulate(machine, requests, lengths.of_requests(requests)))


def simulate_whole(
    machine: SimulatedEngine,
    requests: Sequence[Request],
    half: Sequence[Request],
    lengths: AnswerLengths,
    whole: int,
) -> SimulatedTotals:
    """Simulate a part of a job and half of that part, and extrapolate to the run of the whole job.

    Args:
        machine: The engine.
        requests: The requests of the part.
        half: Half of these requests.
        lengths: Forecasts the answer lengths.
        whole: Number of prompt tokens plus maximum number of output tokens of the whole job.
    """
    larger = simulate_part(machine, requests, lengths)
    one = len(half) == len(requests)  # a single request cannot be halved
    smaller = SimulatedPart(0, SimulatedTotals()) if one else simulate_part(machine, half, lengths)
    return extrapolate(smaller, larger, whole)


def extrapolate(smaller: SimulatedPart, larger: SimulatedPart, whole: int) -> SimulatedTotals:
    """Extrapolate the run of a whole job from simulated runs of two parts, by a straight line through both.

    A single part is not enough, because a run is not proportional to its size: the batch fills at the start and drains
    at the end.

    Args:
        smaller: The smaller part.
        larger: The larger part.
        whole: Number of prompt tokens plus maximum number of output tokens of the whole job.

    Raises:
        ValueError: `larger` is not larger than `smaller`.
    """
    if larger.size <= smaller.size:
        raise ValueError(
            f"parts of {smaller.size} and {larger.size} tokens: the second has to be the larger one"
        )
    times = (whole - larger.size) / (larger.size - smaller.size)
    found = {}
    for name in (field.name for field in fields(SimulatedTotals)):
        few, many = getattr(smaller.run, name), getattr(larger.run, name)
        value = max(many + (many - few) * times, many)
        found[name] = round(value) if isinstance(many, int) else value
    return SimulatedTotals(**found)
