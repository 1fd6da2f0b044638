"""Times a run of a workload from token ids to token ids, through planner, feeder and engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from batchinfer.bench.planning import PlannedWorkload, plan_rows
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
    """A timed run of a workload and its answers.

    Attributes:
        wall_s: Seconds from prompts in memory as token ids to the last answer, planning included.
        plan_s: Seconds of writing the index and planning.
        plan: The order in which requests were computed.
        steps: The measurements of each step.
        shapes: The amount of work of each step, without recomputed tokens.
        answers: Token ids of each row's answer, in the workload's order.
    """

    wall_s: float
    plan_s: float
    plan: Plan
    steps: tuple[StepSample, ...]
    shapes: tuple[StepShape, ...]
    answers: tuple[tuple[int, ...], ...]


Planner = Callable[[Sequence[Row], Path, int, ContentRoots, bool], PlannedWorkload]


def timed_run(
    loaded: LoadedModel,
    rows: Sequence[Row],
    deduplicate: bool = True,
    planner: Planner = plan_rows,
    peaks: Peaks | None = None,
) -> Run:
    """Run the rows of a workload with an empty KV cache, and return times and answers.

    Args:
        loaded: The model with its settings.
        rows: The rows of the workload.
        deduplicate: False to compute duplicates too.
        planner: Plans the rows; see `plan_rows`.
        peaks: The peak rates of the device; None: no draft tokens are used.

    Raises:
        OutOfMemory: The memory of the KV cache is too small for a row. Errors of planning and running are raised as
            well.
    """
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


def _run(
    planned: PlannedWorkload, roots: ContentRoots, engine: Engine, info: EngineInfo, answers: _Answers
) -> None:
    host = InProcessHost(engine, info)
    batches = read_requests(planned.plan, planned.tokens, REQUEST_BATCH, roots)
    run_plan(batches, host, answers, Interrupts(), lambda _: None)


def _shape(step: StepSample) -> StepShape:
    tokens = step.prefill_tokens + step.decode_tokens - step.recomputed_tokens
    return StepShape(tokens, step.sampled_tokens, step.pairs, step.kv_tokens, step.copied_tokens)


class InProcessHost:
    """An engine in this process, with the interface of a worker that `run_plan` needs."""

    def __init__(self, engine: Engine, info: EngineInfo) -> None:
        self._engine, self.info = engine, info
        self.left = False

    @property
    def wants_more(self) -> bool:
        """Return True if the engine's queue has room for further requests."""
        return self._engine.unfinished < max_queued_requests(self.info.max_num_seqs)

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine's queue."""
        self._engine.add(requests)

    def end_plan(self) -> None:
        """Do nothing: a single engine needs no notice that all requests are submitted."""

    def receive(self, timeout_s: float) -> list[WorkDone]:
        """Run one step of the engine and return its results; [] if all requests are finished.

        Args:
            timeout_s: Ignored, because the step runs in this process.
        """
        if not self._engine.unfinished:
            return []
        output = self._engine.step()
        steps = output.samples
        return [WorkDone(output.completions, output.requests, steps)]

    def finish(self, within_s: float) -> None:
        """Mark the engine as finished.

        Args:
            within_s: Ignored, because `run_plan` has received all answers.
        """
        self.left = True


@dataclass(slots=True)
class _Answers:
    """Collects the answers and step samples of `run_plan`."""

    steps: list[StepSample] = field(default_factory=list)
    completions: dict[bytes, Completion] = field(default_factory=dict)
    failed: bool = False

    def register(self, batch: PlanBatch, requests: Sequence[Request]) -> None: ...

    def take(self, done: WorkDone) -> None:
        self.steps += done.steps
        for completion in done.completions:
            self.completions[completion.key] = completion
            self.failed |= _failed(completion)

    def should_stop(self) -> bool:
        return self.failed

    def tick(self) -> None: ...

    def of_rows(self, keys: Sequence[bytes], rows: Sequence[Row]) -> tuple[tuple[int, ...], ...]:
        """Return the answer of each row as token ids.

        Args:
            keys: The work key of each row.
            rows: The rows of the workload.

        Raises:
            BatchInferError: A row failed (OutOfMemory if it did not fit), or an answer has the wrong length.
        """
        for completion in self.completions.values():
            if completion.error is not None and _failed(completion):
                kind = OutOfMemory if completion.error.error_class == "resource" else BatchInferError
                raise kind(f"a row of the benchmark failed: {completion.error.message}")
        found = tuple(tuple(self.completions[key].tokens.token_ids.tolist()) for key in keys)
        for answer, row in zip(found, rows, strict=True):
            if len(answer) != row.max_tokens:
                raise BatchInferError(f"an answer has {len(answer)} tokens; max_tokens is {row.max_tokens}")
        return found


def _failed(completion: Completion) -> bool:
    # Answers with a schema are always incomplete, because all rows generate max_tokens tokens
    return completion.error is not None and completion.error.code != "incomplete_output"
