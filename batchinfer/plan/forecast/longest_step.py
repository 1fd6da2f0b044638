"""The time that the longest step of an engine may take: an engine that is silent for far longer hangs."""

from __future__ import annotations

from batchinfer.engine.config import EngineInfo
from batchinfer.plan.forecast.step_times import step_times
from batchinfer.plan.setup.setting import Setting
from batchinfer.plan.simulation.step_time import StepTime
from batchinfer_kernels.cost import ModelCost, Peaks, StepShape

# What steps may reach of a CPU's peaks while none were measured (`doctor --measure`): plain operators, without a
# compiler, and cores that others use.
UNMEASURED_SHARE = 0.1
SLOWEST = Peaks(1e9, 1e9)  # of a machine of which nothing is known: FLOP/s and bytes a second of a slow core


def longest_step_s(setting: Setting, cost: ModelCost, longest: int, info: EngineInfo) -> float:
    """Return the seconds of the largest step that the engine's limits allow, in which all sequences are as long as the
    `longest` and share nothing."""
    rows, tokens, layers = info.max_num_seqs, info.max_num_batched_tokens, len(cost.windows)
    attended = longest * layers
    shape = StepShape(tokens, min(rows, tokens), tokens * attended, rows * attended)
    times = step_times(setting, cost, None)
    time = StepTime(SLOWEST) if times.known == "unknown" else times.time
    seconds = time.device_s(shape, cost, rows) + time.host_s(rows)
    return seconds / UNMEASURED_SHARE if times.known == "limit" else seconds
