"""Prints what a decode step is expected to gain where attention to half of its rows runs beside the products of the
other half, by the declared costs alone.

python -m tests.batchinfer.engine.halves_expected
"""

from __future__ import annotations

from dataclasses import replace

from batchinfer_kernels.cost import Cost, ModelCost, Peaks, StepShape
from tests.batchinfer.engine.steps_at_once import MODELS
from tests.batchinfer.plan.simulation.test_steady_state import H100

STEPS = ((256, 640), (1024, 640), (256, 2560), (1024, 2560))  # rows, context
SMS = 132
SATURATING = SMS // 3  # multiprocessors that draw all of the memory's bandwidth; assumed


def decode_costs(cost: ModelCost, rows: int, context: int) -> tuple[Cost, list[Cost]]:
    """Return the cost of a step's attention, and of each of its other operators."""
    keys = rows * context * cost.layers
    operators = cost.step(StepShape(rows, rows, keys, keys))
    return operators.pop("attention"), list(operators.values())


def alone_s(cost: ModelCost, rows: int, context: int, peaks: Peaks) -> float:
    """Return the seconds of a step whose operators run one after the other."""
    attention, others = decode_costs(cost, rows, context)
    return sum(each.seconds(peaks) for each in (attention, *others))


def beside_s(cost: ModelCost, rows: int, context: int, peaks: Peaks) -> float:
    """Return the seconds of a step in halves, with the best division of the multiprocessors."""
    attention, others = decode_costs(cost, rows // 2, context)
    moved = attention + sum(others, Cost())
    least = 2 * moved.bytes / peaks.bytes_per_s
    return max(least, 2 * min(_longer_s(attention, others, sms, peaks) for sms in range(1, SMS)))


def _longer_s(attention: Cost, others: list[Cost], sms: int, peaks: Peaks) -> float:
    """Return the seconds of what takes longer: attention on so many multiprocessors, or the other operators of the
    other half on the rest."""
    first, second = (_share(peaks, count) for count in (sms, SMS - sms))
    return max(attention.seconds(first), sum(each.seconds(second) for each in others))


def _share(peaks: Peaks, sms: int) -> Peaks:
    bandwidth = peaks.bytes_per_s * min(sms / SATURATING, 1)
    return replace(peaks, flops_per_s=peaks.flops_per_s * sms / SMS, bytes_per_s=bandwidth)


def table() -> str:
    """Return the table of docs/gpu.md."""
    lines = [
        f"| rows × context | {' | '.join(f'{name}: now, halves, ms | gain' for name in MODELS)} |",
        "|---|" + "---|---|" * len(MODELS),
    ]
    for rows, context in STEPS:
        cells = [f"{rows:,} × {context:,}"]
        for cost in MODELS.values():
            now, halves = (how(cost, rows, context, H100) for how in (alone_s, beside_s))
            cells += [f"{1e3 * now:.2f}, {1e3 * halves:.2f}", f"{now / halves:.2f} ×"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
