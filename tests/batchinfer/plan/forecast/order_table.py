"""Simulated seconds of an 8B model on an H100 by its datasheet, by workload and order.

python tests/batchinfer/plan/forecast/order_table.py [rows]
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))

from batchinfer.bench.workloads import Row, make_workload
from batchinfer.core.content_root import ContentRoots
from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.kv.cache_layout import one_group
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.machine.datasheet import datasheet
from batchinfer.models.spec.spec import CacheSpec
from batchinfer.plan.forecast.order_choice import POLICIES, PlanSample, compared
from batchinfer.plan.simulation.answer_lengths import AnswerLengths
from batchinfer.plan.simulation.simulator import SimulatedEngine
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import Peaks
from tests.batchinfer.engine.simulation import LLAMA_8B


def h100(seqs: int) -> SimulatedEngine:
    """Its engine without time of the host; the cache has 27,000 blocks of 16 tokens."""
    sheet = datasheet("NVIDIA H100 80GB HBM3")
    layout = one_group([CacheSpec(1, 1)] * LLAMA_8B.layers, 16)
    peaks = Peaks(sheet.peak_flops["bfloat16"], sheet.bandwidth)
    return SimulatedEngine(
        LLAMA_8B,
        layout,
        27_000,
        SchedulerConfig(seqs, 8192),
        ContentRoots(100_000),
        StepTime(peaks),
        looks_ahead=True,
    )


def clustered(rows: int) -> list[Row]:
    """Long prompts with short answers, and behind them short prompts with long answers."""
    r = random.Random(8)
    reading = [Row((i, *[7] * r.randint(1000, 3000)), r.randint(8, 32)) for i in range(rows // 2)]
    decoding = [Row((rows + i, *[7] * r.randint(32, 128)), r.randint(100, 250)) for i in range(rows // 2)]
    return reading + decoding


def sampled(rows: Sequence[Row]) -> PlanSample:
    """Return all of a job."""
    requests = [
        Request(
            number.to_bytes(32, "big"),
            np.array(row.prompt, np.int32),
            SamplingParams(max_tokens=row.max_tokens, ignore_eos=True),
        )
        for number, row in enumerate(rows)
    ]
    return PlanSample(requests, range(len(requests)), None)


def main(rows: int) -> None:
    """Print the table."""
    print("| |", " | ".join(POLICIES), "|")
    for name in ("shared-prefix", "mixed", "prefix-tree", "clustered"):
        work = clustered(rows) if name == "clustered" else make_workload(name, 32_000, rows).rows
        found = compared(h100(256), sampled(work), AnswerLengths.unknown())
        print(f"| `{name}` |", " | ".join(f"{found[policy]:.2f} s" for policy in POLICIES), "|", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
