"""The watchdog waits longer than any step of the engine may take."""

from __future__ import annotations

import pytest

from batchinfer.engine.config import EngineInfo
from batchinfer.machine.hardware import Hardware
from batchinfer.pipeline.workers.replica import SILENT_S, SILENT_STEPS
from batchinfer.plan.forecast.run import longest_step_s
from tests.model_costs import llama_cost
from tests.settings import setting_of

CPU = Hardware("a CPU", "cpu", 2, None, {"bfloat16": 1e11}, 3e10, "measured")
GPU = Hardware("a GPU", "cuda", None, 80 << 30, {"bfloat16": 9e14}, 3e12, "datasheet")


def longest(hardware: Hardware, cost: object, tokens: int) -> float:
    info = EngineInfo("ops", hardware.device, "bfloat16", 2, 256, tokens, 16, 1000, 0, 0)
    return longest_step_s(setting_of(hardware), cost, 2048, info)  # type: ignore[arg-type]


def test_the_watchdog_waits_long_enough_for_a_large_model_on_a_small_cpu() -> None:
    """7e9 parameters and 2,048 tokens are 2.9e13 FLOPs: 5 minutes at the peak, and more on a busy machine."""
    cost = llama_cost(32, 4096, 11008, 32, 32, 128, 32000, 2, 2)
    assert longest(CPU, cost, 2048) == pytest.approx(3300, rel=0.3)
    assert SILENT_STEPS * longest(GPU, cost, 8192) < SILENT_S


def test_where_no_peaks_are_known_the_machine_may_be_very_slow() -> None:
    cost = llama_cost(2, 64, 128, 4, 2, 16, 256, 2, 2)
    unknown = Hardware("a machine", "cpu", 2, None)
    assert longest(CPU, cost, 512) < longest(unknown, cost, 512) < SILENT_S
