"""Gives a runner its cache, as its device needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from batchinfer.engine.config import EngineConfig, Untimed
from batchinfer.engine.graphs.decode_graphs import GraphOps
from batchinfer.engine.graphs.graph_capture import GpuRecorder, GraphRecorder, R, Replay
from batchinfer.engine.load.device_fit import CacheRoom, Fitted, fit
from batchinfer.engine.load.dummy_steps import GpuMeter
from batchinfer.engine.load.prompt_fit import fit_prompts
from batchinfer.engine.runner.model_runner import ModelRunner
from batchinfer.engine.schedule.budget import admission_costs, captured_tokens
from batchinfer.engine.schedule.scheduler import SchedulerConfig
from batchinfer.models.decoder.feed_forward import ExpertLoads
from batchinfer_kernels.cost import ModelCost


def fit_cache(
    runner: ModelRunner,
    limits: SchedulerConfig,
    cost: ModelCost,
    room: CacheRoom,
    loads: ExpertLoads | None,
    config: EngineConfig,
    untimed: Untimed,
) -> Fitted:
    """Give the runner its cache. On a GPU steps are measured first, and then captured; `cost`: of the whole
    model, of which the runner may have a part. `loads` are the counters of a model that can be captured, None one that
    cannot."""
    if isinstance(runner.ops, GraphOps) and limits.whole_prompts:
        return fit_prompts(runner, limits, room, GpuMeter(runner.device))
    if isinstance(runner.ops, GraphOps):
        mixed = captured_tokens(cost, config.peaks, limits.max_num_batched_tokens)
        capture = None if loads is None else _Uncounted(GpuRecorder(), loads, untimed)
        drafts = bool(config.drafts) and config.peaks is not None
        asked = (config.logprobs, mixed, drafts, config.load.heads is not None)
        found = fit(runner, limits, room, GpuMeter(runner.device), capture, *asked)
        return found if found.captures_pieces else _by_operators(found, cost, config)
    blocks = room.blocks(0)
    return Fitted(
        replace(runner, caches=room.allocate(blocks)), replace(limits, admission_costs=None), blocks
    )


def _by_operators(found: Fitted, cost: ModelCost, config: EngineConfig) -> Fitted:
    """Steps that read prompts are launched an operator at a time: more of it has to be hidden."""
    costs = found.limits.admission_costs and admission_costs(cost, config.peaks, pieces=False)
    return replace(found, limits=replace(found.limits, admission_costs=costs))


class _Uncounted(GraphRecorder):
    """Records without counting experts' tokens: a step that is captured runs for nobody, and is replayed afterwards."""

    def __init__(self, inner: GraphRecorder, loads: ExpertLoads, untimed: Untimed) -> None:
        self._inner, self._loads, self._untimed = inner, loads, untimed

    @property
    def taken_bytes(self) -> int:
        return self._inner.taken_bytes

    def warm_up(self, run: Callable[[], object]) -> None:
        with self._loads.paused(), self._untimed():  # kernels may be compiled
            self._inner.warm_up(run)

    def record(self, run: Callable[[], R]) -> tuple[R, Replay]:
        with self._loads.paused(), self._untimed():
            return self._inner.record(run)
