"""Records the plans of an engine's steps, and runs them again without an engine.

    python -m tests.batchinfer.engine.recorded_steps CHECKPOINT RECORD RESULTS

reads a record and the checkpoint's weights, launches the record's plans, and writes what they give.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from batchinfer.engine.schedule.constraints import ConstraintMasks
from batchinfer.engine.schedule.step_plan import StepPlan
from batchinfer.models.checkpoint.checkpoint import inspect_checkpoint
from tests.batchinfer.engine.small_engine import Limits, cpu_ops, looking_ahead, make_runner

Given = tuple[list[list[int]], dict[int, tuple[bytes, bytes, bytes]], dict[int, bool]]


@dataclass
class Record:
    """Plans as they were sent, and what was said of masks, which plans name by numbers alone."""

    limits: Limits
    ahead: bool
    on_host: bool
    threads: int
    plans: list[bytes] = field(default_factory=list)
    allowed: list[list[bool]] = field(default_factory=list)
    filled: list[NDArray[np.int32]] = field(default_factory=list)


@dataclass
class RecordedMasks:
    """Stands before the masks of a sampler, and records what they say."""

    masks: ConstraintMasks
    record: Record

    def allowed(self, masks: Any, tokens: Any) -> list[bool]:
        self.record.allowed.append(self.masks.allowed(masks, tokens))
        return self.record.allowed[-1]

    def fill(self, masks: Any, bits: NDArray[np.int32]) -> None:
        self.masks.fill(masks, bits)
        self.record.filled.append(bits.copy())


class ReplayedMasks:
    """Says again what a record has, in order."""

    def __init__(self, record: Record) -> None:
        self._allowed, self._filled = iter(record.allowed), iter(record.filled)

    def allowed(self, masks: Any, tokens: Any) -> list[bool]:
        return next(self._allowed)

    def fill(self, masks: Any, bits: NDArray[np.int32]) -> None:
        bits[:] = next(self._filled)


@dataclass
class Recorder:
    """Stands before a runner, and records its plans and what they give."""

    runner: Any
    record: Record
    launched: list[Any] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Any:
        self.record.plans.append(pickle.dumps(plan))
        self.launched.append(self.runner.launch(plan))
        return self.launched[-1]

    def given(self) -> list[Given]:
        return [given(one) for one in self.launched]


def recorded(runner: Any, masks: ConstraintMasks, record: Record) -> Recorder:
    """The runner, recorded; `masks`: of its sampler."""
    sampler = replace(runner.sampler, mask=RecordedMasks(masks, record))
    return Recorder(replace(runner, sampler=sampler), record)


def given(launched: Any) -> Given:
    """What a step gives, log-probabilities as bits."""
    logprobs = launched.logprobs().items()
    bits = {at: (one.chosen.tobytes(), one.top.tobytes(), one.top_ids.tobytes()) for at, one in logprobs}
    return launched.tokens(), bits, dict(launched.barred())


def replayed(folder: Path, record: Record) -> Iterator[Given]:
    """Launch the plans alone, on a new runner whose cache is poisoned. A step is launched before the tokens of the one
    before it are read, where it was."""
    torch.set_num_threads(record.threads)
    model = inspect_checkpoint(folder)
    runner: Any = make_runner(model, cpu_ops(model), record.limits)
    runner = looking_ahead(runner) if record.ahead else runner
    sampler = replace(runner.sampler, mask=ReplayedMasks(record), on_host=record.on_host)
    runner, before = replace(runner, sampler=sampler), None
    for data in record.plans:
        launched = runner.launch(pickle.loads(data))
        if before is not None:
            yield given(before)
        before = launched
    if before is not None:
        yield given(before)


def main(folder: str, record: str, results: str) -> None:
    found = list(replayed(Path(folder), pickle.loads(Path(record).read_bytes())))
    Path(results).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
