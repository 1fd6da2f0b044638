"""The choice of a plan's order: the one that takes the engine least time, as simulations of a part of the job say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from batchinfer.core.content_root import ContentRoots, shared_by
from batchinfer.core.errors import OutOfMemory, StorageError
from batchinfer.core.prefix_forest import prefix_forest
from batchinfer.core.request import Request
from batchinfer.engine.config import REQUEST_BATCH
from batchinfer.machine.cpus import usable_cpus
from batchinfer.plan.forecast.engine import (
    TWO_PARTS,
    EngineForecast,
    ForecastEngine,
    half_of,
)
from batchinfer.plan.order.block_hashes import NO_CHAIN, chains_of, shared_blocks, sorted_chains
from batchinfer.plan.order.policies import BY_DEFAULT, Capacity, OrderChoice, OrderPolicy, SharedWork
from batchinfer.plan.order.reorder import reorder
from batchinfer.plan.order.requests import Prompts, planned_requests
from batchinfer.plan.order.work_roots import root_number
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.extrapolation import simulated_part, simulated_whole
from batchinfer.plan.simulation.simulator import SimulatedEngine

# Comparing orders may take these seconds, but no longer than the run at the least, or this share of that time
COMPARE_LEAST_S, COMPARE_SHARE = 1.0, 0.02
# Of a job that was simulated in part another order has to be better by this much (docs/measurements/order.md).
SURE = 0.015
# Of equals the first one is taken
POLICIES = (BY_DEFAULT, OrderPolicy.BLENDED, OrderPolicy.LENGTH_SORTED, OrderPolicy.ARRIVAL)


@dataclass(frozen=True, slots=True)
class PlanSample:
    """Some requests of a plan, and where in the input their rows are."""

    requests: Sequence[Request]
    arrivals: Sequence[int]
    whole: int | None  # prompt and output tokens of the job; None: these requests are all of it

    @property
    def half(self) -> PlanSample:
        """Every other stretch of the requests."""
        return PlanSample(half_of(self.requests), half_of(self.arrivals), self.whole)

    def ordered(self, policy: OrderPolicy, capacity: Capacity, roots: ContentRoots) -> list[Request]:
        """The requests as a plan of them alone has them under a policy."""
        requests = self.requests
        numbers = np.array([root_number(roots.of(len(r.prompt), r.params)) for r in requests], np.uint64)
        chains, rows = sorted_chains(chains_of([r.prompt for r in requests], numbers))
        work = SharedWork(
            prefix_forest(shared_blocks(chains.behind(NO_CHAIN))),
            np.array([len(requests[row].prompt) for row in rows], np.int32),
            np.array([requests[row].params.max_tokens for row in rows], np.int32),
            np.array([self.arrivals[row] for row in rows], np.int64),
        )
        places = work.places(policy, capacity).tolist()
        return _linked([requests[row] for _, row in sorted(zip(places, rows, strict=True))], roots)


def settled_forecast(engine: ForecastEngine, prompts: Prompts, budget_s: float) -> EngineForecast:
    """Settle the order of the engine's plan, then forecast it.

    Orders were compared over fewer rows than the forecast simulates: their seconds are scaled, so that the chosen one
    takes what the forecast says.
    """
    order = settle_order(engine, prompts)
    found = engine.forecast(prompts, budget_s)
    compared_s = order.seconds.get(order.policy)
    if found.seconds is not None and compared_s:
        scaled = {policy: found.seconds * (takes / compared_s) for policy, takes in order.seconds.items()}
        order = replace(order, seconds=scaled)
    return replace(found, order=order)


def settle_order(engine: ForecastEngine, prompts: Prompts) -> OrderChoice:
    """Choose the order of the engine's plan, which is in the default one, and write the plan in it.

    The choice is the same for `plan` and for a run. Where disk or memory do not suffice to write the plan anew it stays
    as it is, and the choice says why.
    """
    chosen = _choice(engine, prompts)
    if chosen.policy is BY_DEFAULT:
        return chosen
    try:
        reorder(engine.plan, chosen.policy, capacity_of(engine.machine), threads=usable_cpus())
    except (StorageError, OutOfMemory, MemoryError) as error:
        why = (
            f"because the plan could not be written in {chosen.policy} order, which would be faster: {error}"
        )
        return replace(chosen, policy=BY_DEFAULT, why=why, failed=True)
    return chosen


def capacity_of(machine: SimulatedEngine) -> Capacity:
    """Return the rows and tokens that the engine has room for."""
    return Capacity(machine.scheduler.max_num_seqs, machine.blocks * machine.layout.block_size)


def compared(
    machine: SimulatedEngine, sampled: PlanSample, lengths: AnswerLengths
) -> dict[OrderPolicy, float]:
    """Return by policy the seconds that the engine takes for the whole job."""
    return {policy: _seconds(machine, sampled, policy, lengths) for policy in POLICIES}


def best(seconds: Mapping[OrderPolicy, float], all_rows: bool) -> OrderPolicy:
    """Return the fastest order, or the default one unless another is better for sure."""
    found = min(POLICIES, key=lambda policy: seconds[policy])
    least = 1.0 if all_rows else 1.0 - SURE
    return found if seconds[found] < least * seconds[BY_DEFAULT] else BY_DEFAULT


def _choice(engine: ForecastEngine, prompts: Prompts) -> OrderChoice:
    least_s, plan = engine.least_s(), engine.plan
    if least_s is None:
        return OrderChoice(
            BY_DEFAULT, "the usual order: to compare others, this machine's peaks have to be known"
        )
    if not plan.expected_tokens:
        return OrderChoice(BY_DEFAULT, "the usual order: no other is faster where nothing is decoded")
    budget_s = max(min(COMPARE_LEAST_S, least_s), COMPARE_SHARE * least_s) / len(POLICIES)
    every = engine.every(budget_s)
    if simulation_s(engine, every) > budget_s:
        return OrderChoice(
            BY_DEFAULT,
            "the usual order: in so short a job, comparing others takes longer than they could save",
        )
    read = list(planned_requests(plan, prompts, REQUEST_BATCH, engine.machine.roots, every))
    requests = [request for _, some in read for request in some]
    arrivals = [place for batch, _ in read for place in batch.numbers("token_offset").tolist()]
    all_rows = every == 1 and engine.multiple == 1
    whole = None if all_rows else round((plan.prompt_tokens + plan.expected_tokens) * engine.multiple)
    sampled = PlanSample(requests, arrivals, whole)
    seconds = compared(engine.machine, sampled, engine.lengths)
    share = len(requests) / (plan.to_run * engine.multiple)
    policy = best(seconds, all_rows)
    why = (
        "the usual order: no other is faster in the simulation"
        if policy is BY_DEFAULT
        else "the fastest in the simulation"
    )
    return OrderChoice(policy, why, seconds, share)


def simulation_s(engine: ForecastEngine, every: int) -> float:
    """Return the seconds that simulating such a part of the plan in one order takes."""
    return engine.simulating_s if every == 1 else engine.simulating_s / every * TWO_PARTS


def _seconds(
    machine: SimulatedEngine, sampled: PlanSample, policy: OrderPolicy, lengths: AnswerLengths
) -> float:
    capacity = capacity_of(machine)
    requests = sampled.ordered(policy, capacity, machine.roots)
    if sampled.whole is None:
        return simulated_part(machine, requests, lengths).run.seconds
    half = sampled.half.ordered(policy, capacity, machine.roots)
    return simulated_whole(machine, requests, half, lengths, sampled.whole).seconds


def _linked(requests: list[Request], roots: ContentRoots) -> list[Request]:
    """Return the requests, each of which knows what it shares with the next one."""
    shared = [*shared_by(requests, roots), 0]
    return [replace(request, shares_next=one) for request, one in zip(requests, shared, strict=True)]
