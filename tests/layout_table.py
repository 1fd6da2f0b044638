"""Forecasts the tokens per second of each layout of a 70B Llama on 8 H100, for docs/large-models.md.

`python -m tests.layout_table` takes some minutes. It needs no GPU and measures nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from batchinfer.core.request import Request
from batchinfer.core.sampling import SamplingParams
from batchinfer.engine.ranks.division import Division
from batchinfer.filesystem.state import state_of
from batchinfer.job import load_job
from batchinfer.machine.devices import devices_by_name
from batchinfer.machine.facts import MachineFacts
from batchinfer.plan.forecast.engine import simulated_engine
from batchinfer.plan.forecast.layouts import LayoutForecast
from batchinfer.plan.order.backlog import share_of
from batchinfer.plan.setup.job_setup import check_setup
from batchinfer.plan.simulation.clock import Captures
from batchinfer.plan.simulation.simulator import SimulatedEngine, simulate
from tests.batchinfer.pipeline.test_pipeline import people, write_job
from tests.large_models import hollow_checkpoint

DEVICES, ROWS = "8xh100", 2048
LENGTHS = ((2000, 100), (200, 500))  # tokens in, and out
LAYOUTS = ((2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8))  # tensor ranks, and stages
UNCAPTURED = Captures(0, 0, 0)


def machine_of(path: Path, longest: int, division: Division, captured: bool) -> SimulatedEngine:
    """Return an engine of the layout.

    Args:
        captured: if True, steps run as graphs.
    """
    job, devices = load_job(path), devices_by_name(DEVICES)
    setup = check_setup(job, state_of(job), MachineFacts(devices.hardware))
    setting = setup.setting.with_placement(division=division, replicas=devices.count // division.ranks)
    machine, _ = simulated_engine(job, replace(setup, setting=setting), longest, devices, learns=False)
    return machine if captured else replace(machine, captures=UNCAPTURED)


def tokens_per_s(
    path: Path, division: Division, prompt: int, output: int, captured: bool
) -> tuple[float, float]:
    """Return the output tokens per second of all engines, and the share of time that a stage waits."""
    machine = machine_of(path, prompt + output, division, captured)
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    tokens = np.random.default_rng(0).integers(3, 200, (ROWS, prompt)).astype(np.int32)
    requests = [Request(row.to_bytes(32, "big"), one, params) for row, one in enumerate(tokens)]
    requests = share_of(requests, devices_by_name(DEVICES).count // division.ranks)
    run = simulate(machine, requests, {request.key: output for request in requests})
    return ROWS * output / run.seconds, run.waited_s / run.seconds


def lines(folder: Path) -> Iterator[str]:
    """Yield the table's lines, with the share of time that stages wait."""
    path = write_job(folder, hollow_checkpoint(folder / "model"), people(1))
    for tensor, stages in LAYOUTS:
        division, found = Division(tensor, stages), []
        for prompt, output in LENGTHS:
            found += [tokens_per_s(path, division, prompt, output, captured) for captured in (True, False)]
        cells = " | ".join(f"{each:,.0f}" for each, _ in found)
        yield f"| {name_of(division)} | {cells} |  waits: {', '.join(f'{waits:.1%}' for _, waits in found)}"


def name_of(division: Division) -> str:
    """Return the layout's name in the table."""
    engines = devices_by_name(DEVICES).count // division.ranks
    return LayoutForecast(division.tensor, division.stages, 1, engines).name.removesuffix(", 1 engine")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        for line in lines(Path(made)):
            print(line, flush=True)
