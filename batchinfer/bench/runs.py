"""One timed run: from lists of token ids to lists of token ids, through planner, feeder and engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.bench.planning import Planned, plan_rows
from batchinfer.bench.workloads import Row
from batchinfer.core.content_root import ContentRoots
from batchinfer.core.errors import BatchInferError, OutOfMemory
from batchinfer.core.request import Completion, Request
from batchinfer.core.samples import StepSample
from batchinfer.engine.config import REQUEST_BATCH, EngineInfo, max_queued_requests
from batchinfer.engine.load.loaded_model import LoadedModel
from batchinfer.engine.loop.engine import Engine
from batchinfer.filesystem.temporary import temporary_folder
from batchinfer.pipeline.workers.feed import run_plan
from batchinfer.pipeline.workers.interrupts import Interrupts
from batchinfer.pipeline.workers.messages import WorkDone
from batchinfer.plan.order.plan import Plan, PlanBatch
from batchinfer.plan.order.requests import read_requests
from batchinfer_kernels.cost import Peaks, StepShape


@dataclass(frozen=True, slots=True)
class Run:
    """A timed run and its answers; seconds count from the token ids in memory to the last answer, planning included."""

    wall_s: float
    plan_s: float  # writing the index and planning
    plan: Plan
    steps: tuple[StepSample, ...]
    shapes: tuple[StepShape, ...]  # of each step, without recomputed tokens
    answers: tuple[tuple[int, ...], ...]  # of each row, in the workload's order


Planner = Callable[[Sequence[Row], Path, int, ContentRoots, bool], Planned]


def timed_run(
    loaded: LoadedModel,
    rows: Sequence[Row],
    deduplicate: bool = True,
    planner: Planner = plan_rows,
    peaks: Peaks | None = None,
) -> Run:
    """Run the rows on an empty cache; with drafts, if the model has sources of them and `peaks` are known. Raises
    OutOfMemory when a row does not fit, and what the rooms raise."""
    engine = loaded.engine(peaks)
    answers = _Answers()
    with temporary_folder("bench") as folder:
        began = time.perf_counter()
        roots = loaded.engine_limits.roots
        planned = planner(rows, Path(folder), loaded.info.threads, roots, deduplicate)
        plan_s = time.perf_counter() - began
        _run(planned, roots, engine, loaded.info, answers)
        wall_s = time.perf_counter() - began
    shapes = tuple(map(_shape, answers.steps))
    found = answers.of_rows(planned.keys, rows)
    return Run(wall_s, plan_s, planned.plan, tuple(answers.steps), shapes, found)


def _run(planned: Planned, roots: ContentRoots, engine: Engine, info: EngineInfo, answers: _Answers) -> None:
    host = InProcessHost(engine, info)
    batches = read_requests(planned.plan, planned.tokens, REQUEST_BATCH, roots)
    run_plan(batches, host, answers, Interrupts(), lambda _: None)


def _shape(step: StepSample) -> StepShape:
    """Return what a step ran; tokens that ran again after a preemption are not counted."""
    tokens = step.prefill_tokens + step.decode_tokens - step.recomputed_tokens
    return StepShape(tokens, step.sampled_tokens, step.pairs, step.kv_tokens, step.copied_tokens)


class InProcessHost:
    """An engine in this process, spoken to as `run_plan` speaks to one in a process of its own: each asking for
    progress takes one step.
    """

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._engine, self.info = engine, info
        self.left = False

    @property
    def wants_more(self) -> bool:
        return self._engine.unfinished < max_queued_requests(self.info.max_num_seqs)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.add(requests)

    def exhausted(self) -> None:
        """A single engine has all that was submitted."""

    def receive(self, timeout_s: float) -> list[WorkDone]:
        if not self._engine.unfinished:
            return []
        output = self._engine.step()
        steps = output.samples
        return [WorkDone(output.completions, output.requests, steps)]

    def finish(self, within_s: float) -> None:
        """Nothing runs any more: `run_plan` has heard of every request."""
        self.left = True


@dataclass(slots=True)
class _Answers:
    """The sink of `run_plan`."""

    steps: list[StepSample] = field(default_factory=list)
    completions: dict[bytes, Completion] = field(default_factory=dict)
    failed: bool = False

    def planned(self, batch: PlanBatch, requests: Sequence[Request]) -> None:
        """Nothing is kept of it."""

    def take(self, done: WorkDone) -> None:
        self.steps += done.steps
        for completion in done.completions:
            self.completions[completion.key] = completion
            self.failed |= _failed(completion)

    def enough(self) -> bool:
        return self.failed

    def tick(self) -> None:
        """No clock is kept here."""

    def of_rows(self, keys: Sequence[bytes], rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
        """Every row's answer. Raises when one failed, or has not the length that was asked for."""
        for completion in self.completions.values():
            if completion.error is not None and _failed(completion):
                kind = OutOfMemory if completion.error.error_class == "resource" else BatchInferError
                raise kind(f"a row of the benchmark failed: {completion.error.message}")
        found = tuple(tuple(self.completions[key].tokens.token_ids.tolist()) for key in keys)
        for answer, row in zip(found, rows, strict=True):
            if len(answer) != row.max_tokens:
                raise BatchInferError(f"{len(answer)} tokens came where {row.max_tokens} were asked for")
        return found


def _failed(completion: Completion) -> bool:
    """An answer under a schema is cut before it is whole: it has to have as many tokens as one without."""
    return completion.error is not None and completion.error.code != "incomplete_output"
